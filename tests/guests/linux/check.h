/* What the workloads share: stamped pages, heartbeats, a steady pace, options
 * from the kernel command line. The lines are those of the bare-metal guest,
 * with the name of the workload added. */

#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <time.h>

enum { PAGE = 4096, PAGE_WORDS = PAGE / 8, MIB = 1 << 20 };

/* One workload's life so far. Zero but for the name at first. */
struct report {
        const char *who;
        uint64_t beats, visits, lap, writes, lost;
        struct timespec next_beat;
};

/* Prints a heartbeat if a tenth of a second has passed. */
void report_beat(struct report *report);
/* Prints and counts memory that is not what was written. */
void report_lost(struct report *report, uint64_t page, uint64_t want, uint64_t got, const char *kind);

/* Holds the caller back to `rate` calls per second; 0 is no limit. */
void keep_pace(uint64_t rate);

/* Fills a page with what follows from its number and generation. */
void stamp_page(uint64_t *words, uint64_t page, uint64_t generation);
/* What is wrong with a page, or 0. */
const char *page_fault(const uint64_t *words, uint64_t page, uint64_t generation);
/* The generation that a page claims to be of. */
uint64_t page_generation(const uint64_t *words);

/* Spreads any number over 64 bits; word N of the disk is mixed(N). */
static inline uint64_t mixed(uint64_t x)
{
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
}

/* The next number of a sequence that never ends; `state` is any number at first. */
uint64_t random_number(uint64_t *state);

/* The value of `name=` on the kernel command line, as a number. */
uint64_t option_number(const char *name, uint64_t otherwise);
/* The same as a text, which stays valid; 0 if it is not there. */
const char *option_text(const char *name);

/* Memory of its own, or the end of the workload. */
void *map_memory(uint64_t bytes);
/* Says why this workload can't go on, and ends it. */
void give_up(const char *what) __attribute__((noreturn));

/* The workloads. Each runs for ever. */
void memcheck(void);
void diocheck(void);
void discardcheck(void);
void redis(void);

#endif
