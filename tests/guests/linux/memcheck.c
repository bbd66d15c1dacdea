/* Stamps pages of anonymous memory, verifies one at every visit and writes its
 * next generation. Options: pages=N (default 4096), dirty=N (pages written per
 * lap; all), rate=N (visits per second; 20000). */

#include "check.h"

static struct report report = { .who = "memcheck" };
static uint64_t *memory;
static uint32_t *generations;

static void write_next(uint64_t page)
{
        stamp_page(memory + page * PAGE_WORDS, page, ++generations[page]);
        report.writes++;
}

static void visit(uint64_t page, int write)
{
        const uint64_t *words = memory + page * PAGE_WORDS;
        const char *fault = page_fault(words, page, generations[page]);

        report.visits++;
        if (fault)
                report_lost(&report, page, generations[page], page_generation(words), fault);
        if (fault || write)             /* a lost page is written anew, so it counts once */
                write_next(page);
}

void memcheck(void)
{
        uint64_t pages = option_number("pages", 4096);
        uint64_t dirty = option_number("dirty", pages);
        uint64_t rate = option_number("rate", 20000);
        uint64_t x = 0, bits = 1;

        memory = map_memory(pages * PAGE);
        generations = map_memory(pages * sizeof *generations);
        for (uint64_t page = 0; page < pages; page++)
                write_next(page);
        while (1ull << bits < pages)
                bits++;
        /* As in the bare-metal guest: each page once a lap, in an order that looks random. */
        for (uint64_t position = 0;;) {
                x = (5 * x + 1) & ((1ull << bits) - 1);
                uint64_t page = x ^ x >> (bits + 1) / 2;
                if (page < pages) {
                        visit(page, (position + 1) * dirty / pages > position * dirty / pages);
                        position++;
                        report_beat(&report);
                        keep_pace(rate);
                }
                if (x == 0) {
                        position = 0;
                        report.lap++;
                }
        }
}
