# Short recipes; the work is done by cargo and by the scripts in tools/.

.PHONY: bench-qemu check demo deps fuzz guests test

# All tests, with real QEMUs; says what it skipped and why.
test:
	@tools/test.sh

# Format, lints, licences: what needs no VM.
check:
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets -- -D warnings
	@tools/arm64.sh
	@tools/deny.sh

# Every fuzz target for FUZZ_SECONDS (60).
fuzz:
	@tools/fuzz.sh $${FUZZ_SECONDS:-60}

# Installs what the other targets need (as root, on Debian 12); quick when it is there.
deps:
	@tools/deps.sh

# Builds the guests that check themselves, and prints where they are.
guests:
	@tests/guests/multiboot/build.sh
	@tests/guests/linux/build.sh

# Moves a guest live between two QEMUs on this host. JSON=1: the last line is a JSON object.
demo:
	@tools/demo.sh

# Moves the same VM by QEMU's own migration and by whimbrel, in turn. RUNS=5 SIZE=4G CASES=zero,half MEMORY=file
# ACCEL=tcg narrow it; JSON=1 ends with an object, RECORD=1 keeps the samples under bench/record.
bench-qemu:
	@cargo build --quiet --release -p whimbrel
	@cargo run --quiet --release -p whimbrel-bench
