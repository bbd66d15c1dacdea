# Short recipes; the work is done by cargo and by the scripts in tools/.

.PHONY: deps guests

# Installs what the other targets need (as root, on Debian 12); quick when it is there.
deps:
	@tools/deps.sh

# Builds the guests that check themselves, and prints where they are.
guests:
	@tests/guests/multiboot/build.sh
	@tests/guests/linux/build.sh
