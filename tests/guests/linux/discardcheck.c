/* Fills huge blocks of memory with stamped pages and gives them back, over and
 * over, so that a balloon with free page reporting lets the host discard them
 * (the guest's kernel reports a free block after two seconds). Some blocks hold
 * data at any time, some are discarded, and each changes from one to the other
 * every few seconds. Kept blocks must keep their data; fresh ones must be zero.
 * Option: discard_mib=N (default 64). */

#define _GNU_SOURCE
#include "check.h"

#include <sys/mman.h>

enum { BLOCK = 2 * MIB, BLOCK_PAGES = BLOCK / PAGE, STEPS_PER_SECOND = 20, SECONDS_PER_ROUND = 5 };

static struct report report = { .who = "discardcheck" };
static uint64_t *memory;
static uint32_t *generations;           /* of each block; 0 while it is given back */
static uint32_t generation;

static uint64_t *words_of(uint64_t block, uint64_t page)
{
        return memory + (block * BLOCK_PAGES + page) * PAGE_WORDS;
}

static void fill(uint64_t block)
{
        generations[block] = ++generation;
        for (uint64_t page = 0; page < BLOCK_PAGES; page++) {
                uint64_t *words = words_of(block, page);
                uint64_t number = block * BLOCK_PAGES + page, any = 0;
                words[0] = 1;           /* by writing, or the kernel would map its one zero page */
                for (int at = 1; at < PAGE_WORDS; at++)
                        any |= words[at];
                if (any)
                        report_lost(&report, number, 0, any, "not-zero");
                stamp_page(words, number, generations[block]);
                report.writes++;
        }
}

static void verify(uint64_t block)
{
        for (uint64_t page = 0; page < BLOCK_PAGES; page++) {
                const uint64_t *words = words_of(block, page);
                uint64_t number = block * BLOCK_PAGES + page;
                const char *fault = page_fault(words, number, generations[block]);
                if (fault)
                        report_lost(&report, number, generations[block], page_generation(words), fault);
                report.visits++;
        }
}

static void give_back(uint64_t block)
{
        generations[block] = 0;
        if (madvise(words_of(block, 0), BLOCK, MADV_DONTNEED))
                give_up("madvise");
}

void discardcheck(void)
{
        uint64_t blocks = option_number("discard_mib", 64) * MIB / BLOCK;
        uint64_t random = 1, steps = 0;
        const uint64_t steps_per_round = STEPS_PER_SECOND * SECONDS_PER_ROUND;

        blocks = blocks ? blocks : 1;
        memory = map_memory((blocks + 1) * BLOCK);
        memory = (uint64_t *)(((uintptr_t)memory + BLOCK - 1) & -(uintptr_t)BLOCK);
        generations = map_memory(blocks * sizeof *generations);
        madvise(memory, blocks * BLOCK, MADV_HUGEPAGE);
        for (;;) {
                uint64_t block = steps % blocks;
                if (generations[block])
                        verify(block);
                /* Each block changes once in a round, on average. */
                if (random_number(&random) % steps_per_round < blocks) {
                        uint64_t other = random_number(&random) % blocks;
                        if (generations[other]) {
                                verify(other);
                                give_back(other);
                        } else {
                                fill(other);
                        }
                }
                if (++steps % blocks == 0)
                        report.lap++;
                report_beat(&report);
                keep_pace(STEPS_PER_SECOND);
        }
}
