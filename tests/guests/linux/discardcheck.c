/* Fills huge blocks of memory with stamped pages and gives most of them back at
 * once, over and over, so that a balloon with free page reporting lets the host
 * discard them: the guest's kernel reports free blocks two seconds later. It
 * prints "gave back" at that moment. (Blocks given back one by one would be
 * handed out again before they are reported.) Kept blocks must keep their data;
 * fresh ones must be zero. Option: discard_mib=N (default 64). */

#define _GNU_SOURCE
#include "check.h"

#include <stdio.h>
#include <sys/mman.h>

enum {
        BLOCK = 2 * MIB,
        BLOCK_PAGES = BLOCK / PAGE,
        KEPT_OF = 4,                    /* one block of so many is kept, another one each round */
        PASSES_EMPTY = 35,              /* a tenth of a second each: the kernel's two, and the host's work */
};

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

static void verify_all(uint64_t blocks)
{
        for (uint64_t block = 0; block < blocks; block++) {
                if (generations[block])
                        verify(block);
                report_beat(&report);
        }
        report.lap++;
}

static void fill_all(uint64_t blocks)
{
        for (uint64_t block = 0; block < blocks; block++) {
                if (!generations[block])
                        fill(block);
                report_beat(&report);
        }
}

static void give_back_most(uint64_t blocks, uint64_t round)
{
        for (uint64_t block = 0; block < blocks; block++) {
                if ((block + round) % KEPT_OF == 0)
                        continue;
                generations[block] = 0;
                if (madvise(words_of(block, 0), BLOCK, MADV_DONTNEED))
                        give_up("madvise");
        }
        printf("gave back round=%lu\n", round);
}

void discardcheck(void)
{
        uint64_t blocks = option_number("discard_mib", 64) * MIB / BLOCK;
        const struct timespec pause = { 0, 100000000 };

        blocks = blocks ? blocks : 1;
        memory = map_memory((blocks + 1) * BLOCK);
        memory = (uint64_t *)(((uintptr_t)memory + BLOCK - 1) & -(uintptr_t)BLOCK);
        generations = map_memory(blocks * sizeof *generations);
        madvise(memory, blocks * BLOCK, MADV_HUGEPAGE);
        for (uint64_t round = 0;; round++) {
                fill_all(blocks);
                verify_all(blocks);
                give_back_most(blocks, round);
                for (int pass = 0; pass < PASSES_EMPTY; pass++) {
                        verify_all(blocks);
                        nanosleep(&pause, 0);
                }
        }
}
