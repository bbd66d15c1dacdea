/* A firmware that does nothing but load a multiboot guest: a few thousand
 * instructions where SeaBIOS takes millions, for a KVM in software that emulates
 * them one by one. QEMU has unpacked the guest already and hands it out through
 * its "fw_cfg" device, together with a map of RAM. */

#include <stdint.h>

/* fw_cfg: what is handed out under which key, and the registers. */
enum {
        KERNEL_ADDRESS = 0x07,
        KERNEL_SIZE = 0x08,
        INFO_ADDRESS = 0x0a,            /* where an initramfs would be: the multiboot information */
        INFO_SIZE = 0x0b,
        KERNEL_ENTRY = 0x10,
        KERNEL_DATA = 0x11,
        INFO_DATA = 0x12,
        DIRECTORY = 0x19,
        SELECTOR_PORT = 0x510,
        DATA_PORT = 0x511,
        DMA_PORT = 0x514,
        DMA_READ = 2,
        DMA_SELECT = 8,
};

/* Multiboot's map of RAM, in low memory that nothing else uses. */
enum { MAP_ADDRESS = 0x9000, MAP_ENTRY_BYTES = 20, INFO_HAS_MAP = 1 << 6 };

struct __attribute__((packed)) map_entry {
        uint32_t bytes;                 /* that follow */
        uint64_t start, length;
        uint32_t type;
};

struct loaded {
        uint32_t entry, info;
};

/* The CPU's interrupt controller, and how it takes the legacy one's interrupts. */
enum {
        LOCAL_APIC = 0xFEE00000,
        SPURIOUS_VECTOR = LOCAL_APIC + 0xF0,
        LINE_0 = LOCAL_APIC + 0x350,
        APIC_ENABLED = 0x1FF,
        EXTERNAL = 0x8700,
};

static void out16(uint16_t port, uint16_t value)
{
        __asm__ volatile("outw %0, %1" : : "a"(value), "Nd"(port));
}

static void out32(uint16_t port, uint32_t value)
{
        __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"(port));
}

static void read_next(void *to, uint32_t bytes)
{
        __asm__ volatile("rep insb" : "+D"(to), "+c"(bytes) : "d"(DATA_PORT) : "memory");
}

static uint32_t number(uint16_t key)
{
        uint32_t value;
        out16(SELECTOR_PORT, key);
        read_next(&value, sizeof value);
        return value;
}

/* QEMU copies while the last `out` executes. */
static void load(uint16_t key, uint32_t address, uint32_t bytes)
{
        struct {
                uint32_t control, length;
                uint64_t address;
        } request = {
                __builtin_bswap32(key << 16 | DMA_SELECT | DMA_READ),
                __builtin_bswap32(bytes),
                __builtin_bswap64(address),
        };
        __asm__ volatile("" : : "r"(&request) : "memory");
        out32(DMA_PORT, 0);
        out32(DMA_PORT + 4, __builtin_bswap32((uint32_t)&request));
        __asm__ volatile("" : : : "memory");
}

/* Selects the file "etc/e820"; gives its size. */
static uint32_t select_map(void)
{
        struct {
                uint32_t bytes;
                uint16_t key, reserved;
                char name[56];
        } file;
        uint32_t count;

        out16(SELECTOR_PORT, DIRECTORY);
        read_next(&count, sizeof count);
        for (count = __builtin_bswap32(count); count > 0; count--) {
                static const char name[] = "etc/e820";
                unsigned at = 0;
                read_next(&file, sizeof file);
                while (at < sizeof name && file.name[at] == name[at])
                        at++;
                if (at == sizeof name) {
                        out16(SELECTOR_PORT, __builtin_bswap16(file.key));
                        return __builtin_bswap32(file.bytes);
                }
        }
        return 0;
}

void firmware_main(struct loaded *loaded)
{
        uint32_t *info = (uint32_t *)number(INFO_ADDRESS);
        struct map_entry *map = (struct map_entry *)MAP_ADDRESS;
        uint32_t entries;

        load(KERNEL_DATA, number(KERNEL_ADDRESS), number(KERNEL_SIZE));
        load(INFO_DATA, (uint32_t)info, number(INFO_SIZE));
        entries = select_map() / MAP_ENTRY_BYTES;
        for (uint32_t at = 0; at < entries; at++) {
                map[at].bytes = MAP_ENTRY_BYTES;
                read_next(&map[at].start, MAP_ENTRY_BYTES);
        }
        info[0] |= INFO_HAS_MAP;
        info[11] = entries * sizeof *map;
        info[12] = MAP_ADDRESS;
        *(volatile uint32_t *)SPURIOUS_VECTOR = APIC_ENABLED;
        *(volatile uint32_t *)LINE_0 = EXTERNAL;
        loaded->entry = number(KERNEL_ENTRY);
        loaded->info = (uint32_t)info;
}
