/* A guest that checks its own memory. It owns nearly all RAM; every page of its
 * working set carries {magic, page number, generation, hash} and a body that
 * follows from the page number and the generation. Each visit verifies one page
 * wholly against a table of generations, then may write the next generation.
 * A page that went back in time, was torn, misplaced, or kept what should have
 * become zero is printed as LOST. Knows nothing of who moves it.
 *
 * Command line: pages=N (working set; default all RAM), dirty=N (pages written
 * per lap; default all), zero=1 (every write turns data into zeros or back),
 * rate=N (visits per second; default no limit), mode=write|idle,
 * fill=none|zero|half|random (all RAM, before the working set is stamped). */

#include <stdint.h>

enum {
        PAGE = 4096,
        WORDS = PAGE / 8,
        HEADER_WORDS = 4,
        HZ = 100,
        TICKS_PER_BEAT = HZ / 10,
        LOST_LINES_MAX = 64,
        RANGES_MAX = 8,
        BREAKPOINT_VECTOR = 3,
        TIMER_VECTOR = 32,
        VECTORS = 48,
};

static const uint64_t MAGIC = 0x6c6572626d696857ull;     /* "Whimbrel" */
static const uint64_t MAPPED = 16ull << 30;               /* by boot.S */
static const uint64_t MIB = 1ull << 20;

struct range {
        uint64_t start, pages;
};

/* What the command line asked for. */
static uint64_t page_count, dirty_count, rate;
static int flips_to_zero, idle;
static const char *fill;

static struct range ranges[RANGES_MAX];
static int range_count;
static uint32_t *generations;           /* one per page of the working set */
static uint64_t generations_sum;        /* over mixed(page, generation) of the whole table */

static uint64_t visits, laps, writes, lost, beats;
static uint64_t next_beat, credit, credit_tick;
volatile uint64_t ticks;

static void read_memory_map(const uint32_t *info);
static void read_command_line(const char *line);
static void start_timer(void);
static void fill_ram(void);
static void place_generations(void);
static void run_lap(void);
static void visit(uint64_t page, int write);
static void check_generations(void);
static void stamp(uint64_t page, uint32_t generation);
static void keep_time(void);
static void sleep_a_tick(void);
static void say(const char *format, ...);

void guest_main(const uint32_t *info)
{
        read_memory_map(info);
        read_command_line((const char *)(uintptr_t)info[4]);
        start_timer();
        fill_ram();
        place_generations();
        if (!idle)
                for (uint64_t page = 0; page < page_count; page++)
                        stamp(page, 1);
        say("ready pages=%u base=%x\n", page_count, ranges[0].start);
        if (idle)
                keep_time();
        for (;;)
                run_lap();
}

/* A lap visits every page once, in an order that is the same in each lap: x ->
 * 5x + 1 runs through all residues of a power of two, and the fold of high bits
 * onto low ones, which keeps each value distinct, makes the order look random. */
static void run_lap(void)
{
        int bits = 1;
        while (1ull << bits < page_count)
                bits++;
        uint64_t mask = (1ull << bits) - 1, x = 0, position = 0;

        do {
                x = (5 * x + 1) & mask;
                uint64_t page = x ^ x >> (bits + 1) / 2;
                if (page >= page_count)
                        continue;
                /* Spreads dirty_count writes evenly over the lap. */
                int write = (position + 1) * dirty_count / page_count > position * dirty_count / page_count;
                position++;
                visit(page, write);
                keep_time();
        } while (x != 0);
        check_generations();
        laps++;
}

/* Prints heartbeats, and sleeps while the rate is used up; for ever when idle. */
static void keep_time(void)
{
        for (;;) {
                if (ticks >= next_beat) {
                        next_beat = ticks + TICKS_PER_BEAT;
                        say("ok beat=%u visits=%u lap=%u gen=%u lost=%u\n", beats++, visits, laps, writes, lost);
                }
                if (ticks != credit_tick && credit < 2 * rate)
                        credit += rate;
                credit_tick = ticks;
                if (!idle && (rate == 0 || credit >= HZ)) {
                        credit -= rate == 0 ? 0 : HZ;
                        return;
                }
                sleep_a_tick();
        }
}

/* --- pages ------------------------------------------------------------- */

static uint64_t mixed(uint64_t x)
{
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
}

/* Working set first, in the order of the ranges. */
static uint64_t *words_of(uint64_t page)
{
        struct range *range = ranges;
        while (page >= range->pages)
                page -= range++->pages;
        return (uint64_t *)(range->start + page * PAGE);
}

static int is_zero_generation(uint32_t generation)
{
        return flips_to_zero && generation % 2 == 0;
}

/* The hash binds the header too: a header of one generation over the body of
 * another does not match, which is how a torn page shows. */
static uint64_t hash_of(const uint64_t *words)
{
        uint64_t hash = words[0] ^ mixed(words[1]) ^ mixed(words[2] + MAGIC);
        for (int at = HEADER_WORDS; at < WORDS; at++)
                hash = (hash ^ words[at]) * 0x9e3779b97f4a7c15ull;
        return mixed(hash);
}

static void stamp(uint64_t page, uint32_t generation)
{
        uint64_t *words = words_of(page);

        generations_sum += mixed(page << 32 | generation) - mixed(page << 32 | generations[page]);
        generations[page] = generation;
        writes++;
        if (is_zero_generation(generation)) {
                for (int at = 0; at < WORDS; at++)
                        words[at] = 0;
                return;
        }
        uint64_t state = mixed(page << 32 | generation);
        for (int at = HEADER_WORDS; at < WORDS; at++) {
                state ^= state << 13, state ^= state >> 7, state ^= state << 17;
                words[at] = state;
        }
        words[0] = MAGIC;
        words[1] = page;
        words[2] = generation;
        words[3] = hash_of(words);
}

/* What is wrong with a page, or 0. */
static const char *fault_of(uint64_t page, const uint64_t *words)
{
        uint64_t any = 0;
        for (int at = 0; at < WORDS; at++)
                any |= words[at];
        if (is_zero_generation(generations[page]))
                if (!any)
                        return 0;
        if (!any)
                return "zero";
        if (words[0] != MAGIC || words[3] != hash_of(words))
                return "torn";
        if (words[1] != page)
                return "misplaced";
        if (words[2] != generations[page])
                return "stale";
        return 0;
}

static void report_lost(const char *kind, uint64_t page, uint64_t want, uint64_t got)
{
        if (lost++ < LOST_LINES_MAX)
                say("LOST page=%u want=%u got=%u kind=%s\n", page, want, got, kind);
}

static void visit(uint64_t page, int write)
{
        const uint64_t *words = words_of(page);
        const char *fault = fault_of(page, words);

        visits++;
        if (fault)
                report_lost(fault, page, generations[page], words[2]);
        if (fault || write)                     /* a lost page is written anew, so it counts once */
                stamp(page, generations[page] + 1);
}

static void check_generations(void)
{
        uint64_t sum = 0;
        for (uint64_t page = 0; page < page_count; page++)
                sum += mixed(page << 32 | generations[page]);
        if (sum != generations_sum)
                report_lost("table", page_count, generations_sum, sum);
        generations_sum = sum;
}

/* --- memory ------------------------------------------------------------ */

/* RAM that is ours: what the firmware calls usable, above this image and below
 * the last MiB of each range. */
static void read_memory_map(const uint32_t *info)
{
        extern char image_end[];
        /* QEMU puts the multiboot information and the command line right behind the image. */
        uint64_t lowest = ((uint64_t)info[4] + 2 * PAGE) & -(uint64_t)PAGE;
        uint64_t map = info[12], end = map + info[11];

        if (lowest < (uint64_t)image_end + PAGE)
                lowest = (uint64_t)image_end + PAGE;
        while (map < end && range_count < RANGES_MAX) {
                const uint32_t *entry = (const uint32_t *)map;
                uint64_t start = entry[1] | (uint64_t)entry[2] << 32;
                uint64_t stop = start + (entry[3] | (uint64_t)entry[4] << 32);
                map += entry[0] + 4;
                if (start < lowest)
                        start = lowest;
                if (stop > MAPPED)
                        stop = MAPPED;
                if (entry[5] != 1 || stop < start + 2 * MIB)
                        continue;
                ranges[range_count++] = (struct range){ start, (stop - start - MIB) / PAGE };
        }
}

static uint64_t pages_owned(void)
{
        uint64_t pages = 0;
        for (int at = 0; at < range_count; at++)
                pages += ranges[at].pages;
        return pages;
}

/* The table of generations takes the first pages of the first range. */
static void place_generations(void)
{
        uint64_t pages = pages_owned();
        uint64_t table_pages = ((page_count < pages ? page_count : pages) * 4 + PAGE - 1) / PAGE;

        generations = (uint32_t *)ranges[0].start;
        ranges[0].start += table_pages * PAGE;
        ranges[0].pages -= table_pages;
        if (page_count > pages - table_pages)
                page_count = pages - table_pages;
        if (dirty_count > page_count)
                dirty_count = page_count;
        if (idle)
                return;                         /* touches nothing */
        for (uint64_t page = 0; page < page_count; page++) {
                generations[page] = 0;
                generations_sum += mixed(page << 32);
        }
}

static void fill_ram(void)
{
        uint64_t pages = pages_owned(), state = MAGIC, start = ticks;

        if (fill[0] == 'n')
                return;
        for (uint64_t page = 0; page < pages; page++) {
                uint64_t *words = words_of(page);
                int random = fill[0] == 'r' || (fill[0] == 'h' && page % 2);
                for (int at = 0; at < WORDS; at++) {
                        if (random)
                                state ^= state << 13, state ^= state >> 7, state ^= state << 17;
                        words[at] = random ? state : 0;
                }
        }
        say("filled pages=%u ms=%u\n", pages, (ticks - start) * 1000 / HZ);
}

/* --- command line ------------------------------------------------------ */

/* What follows `name` in the command line, or 0. */
static const char *option(const char *line, const char *name)
{
        for (; *line; line++) {
                const char *at = line, *letter = name;
                while (*letter && *at == *letter)
                        at++, letter++;
                if (!*letter)
                        return at;
                while (*line && *line != ' ')
                        line++;
                if (!*line)
                        break;
        }
        return 0;
}

static uint64_t number(const char *text, uint64_t otherwise)
{
        uint64_t value = 0;
        if (!text)
                return otherwise;
        for (; *text >= '0' && *text <= '9'; text++)
                value = value * 10 + (*text - '0');
        return value;
}

static void read_command_line(const char *line)
{
        const char *mode = option(line, "mode=");

        fill = option(line, "fill=");
        if (!fill)
                fill = "none";
        idle = mode && *mode == 'i';
        page_count = number(option(line, "pages="), ~0u);
        if (page_count == 0)
                page_count = 1;
        dirty_count = number(option(line, "dirty="), ~0u);
        rate = number(option(line, "rate="), 0);
        flips_to_zero = number(option(line, "zero="), 0) != 0;
}

/* --- devices ----------------------------------------------------------- */

static void out8(uint16_t port, uint8_t value)
{
        __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static struct {
        uint64_t low, high;
} gates[VECTORS];

/* An interrupt gate that ring 3 may use. */
static void set_gate(int vector, void handler(void))
{
        uint64_t at = (uint64_t)handler;
        gates[vector].low = (at & 0xffff) | 8 << 16 | 0xee00ull << 32 | (at >> 16 & 0xffff) << 48;
}

/* A legacy timer interrupt at HZ; every other line is masked. Goes on in ring 3. */
static void start_timer(void)
{
        extern void on_timer(void), on_call(void), on_spurious(void), enter_user_mode(void);
        const uint16_t pointer[] = { sizeof gates - 1, (uint64_t)gates, (uint64_t)gates >> 16, 0, 0 };
        const uint32_t divisor = 1193182 / HZ;

        for (int vector = TIMER_VECTOR; vector < VECTORS; vector++)
                set_gate(vector, on_spurious);
        set_gate(TIMER_VECTOR, on_timer);
        set_gate(BREAKPOINT_VECTOR, on_call);
        __asm__ volatile("lidt %0" : : "m"(pointer));
        out8(0x20, 0x11), out8(0x21, TIMER_VECTOR), out8(0x21, 4), out8(0x21, 1), out8(0x21, 0xfe);
        out8(0xa0, 0x11), out8(0xa1, TIMER_VECTOR + 8), out8(0xa1, 2), out8(0xa1, 1), out8(0xa1, 0xff);
        out8(0x43, 0x34), out8(0x40, divisor & 0xff), out8(0x40, divisor >> 8);
        enter_user_mode();
}

/* Sleeps until the next timer interrupt (0), or prints a letter. */
static void call(uint64_t what)
{
        __asm__ volatile("int3" : : "D"(what) : "rax", "rdx", "memory");
}

static void sleep_a_tick(void)
{
        call(0);
}

static void put(char letter)
{
        call(letter);
}

static void put_number(uint64_t value, unsigned base)
{
        if (value >= base)
                put_number(value / base, base);
        put("0123456789abcdef"[value % base]);
}

/* Knows %u and %x (uint64_t) and %s. */
static void say(const char *format, ...)
{
        __builtin_va_list values;
        __builtin_va_start(values, format);
        for (; *format; format++) {
                if (*format != '%') {
                        put(*format);
                        continue;
                }
                switch (*++format) {
                case 'u':
                        put_number(__builtin_va_arg(values, uint64_t), 10);
                        break;
                case 'x':
                        put_number(__builtin_va_arg(values, uint64_t), 16);
                        break;
                default:
                        for (const char *text = __builtin_va_arg(values, const char *); *text; text++)
                                put(*text);
                }
        }
        __builtin_va_end(values);
}
