/* What the workloads share; see check.h. */

#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
        HEADER_WORDS = 4,
        BEAT_NS = 100000000,
        SLOT_NS = 10000000,
        SECOND_NS = 1000000000,
        LOST_LINES_MAX = 64,
};

static const uint64_t MAGIC = 0x6c6572626d696857ull;     /* "Whimbrel" */

static void add_ns(struct timespec *time, long ns)
{
        time->tv_nsec += ns;
        if (time->tv_nsec >= SECOND_NS) {
                time->tv_nsec -= SECOND_NS;
                time->tv_sec++;
        }
}

static int is_before(const struct timespec *a, const struct timespec *b)
{
        return a->tv_sec < b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec < b->tv_nsec);
}

/* --- reports ----------------------------------------------------------- */

void report_beat(struct report *report)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        if (is_before(&now, &report->next_beat))
                return;
        report->next_beat = now;
        add_ns(&report->next_beat, BEAT_NS);
        /* One write a line: lines of several workloads never mix. */
        printf("ok who=%s beat=%lu visits=%lu lap=%lu gen=%lu lost=%lu\n", report->who, report->beats++,
               report->visits, report->lap, report->writes, report->lost);
}

void report_lost(struct report *report, uint64_t page, uint64_t want, uint64_t got, const char *kind)
{
        if (report->lost++ < LOST_LINES_MAX)
                printf("LOST who=%s page=%lu want=%lu got=%lu kind=%s\n", report->who, page, want, got, kind);
}

void give_up(const char *what)
{
        printf("LOST %s: %s\n", what, strerror(errno));
        exit(1);
}

/* --- pace -------------------------------------------------------------- */

void keep_pace(uint64_t rate)
{
        static struct timespec slot_end;
        static uint64_t credit;         /* in units of 1 / (slots per second) */
        const uint64_t slots = SECOND_NS / SLOT_NS;
        struct timespec now;

        if (rate == 0)
                return;
        while (credit < slots) {
                clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &slot_end, 0);
                clock_gettime(CLOCK_MONOTONIC, &now);
                credit += rate;
                add_ns(&slot_end, SLOT_NS);
                if (is_before(&slot_end, &now))         /* never catches up on a pause */
                        slot_end = now;
        }
        credit -= slots;
}

/* --- pages ------------------------------------------------------------- */

/* Binds the header too: a header of one generation over the body of another
 * does not match, which is how a torn page shows. */
static uint64_t hash_of(const uint64_t *words)
{
        uint64_t hash = words[0] ^ mixed(words[1]) ^ mixed(words[2] + MAGIC);
        for (int at = HEADER_WORDS; at < PAGE_WORDS; at++)
                hash = (hash ^ words[at]) * 0x9e3779b97f4a7c15ull;
        return mixed(hash);
}

void stamp_page(uint64_t *words, uint64_t page, uint64_t generation)
{
        uint64_t state = mixed(page << 32 | generation) | 1;

        for (int at = HEADER_WORDS; at < PAGE_WORDS; at++)
                words[at] = random_number(&state);
        words[0] = MAGIC;
        words[1] = page;
        words[2] = generation;
        words[3] = hash_of(words);
}

const char *page_fault(const uint64_t *words, uint64_t page, uint64_t generation)
{
        if (words[0] == 0 && words[2] == 0)
                return "zero";
        if (words[0] != MAGIC || words[3] != hash_of(words))
                return "torn";
        if (words[1] != page)
                return "misplaced";
        if (words[2] != generation)
                return "stale";
        return 0;
}

uint64_t page_generation(const uint64_t *words)
{
        return words[2];
}

uint64_t random_number(uint64_t *state)
{
        uint64_t x = *state ? *state : MAGIC;
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        return *state = x;
}

void *map_memory(uint64_t bytes)
{
        void *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
                give_up("mmap");
        return memory;
}

/* --- options ----------------------------------------------------------- */

const char *option_text(const char *name)
{
        static char line[4096];
        size_t length = strlen(name);

        if (!line[0]) {
                int file = open("/proc/cmdline", O_RDONLY);
                if (file < 0 || read(file, line, sizeof line - 1) <= 0)
                        give_up("/proc/cmdline");
                close(file);
        }
        for (const char *at = line; (at = strstr(at, name)); at += length)
                if ((at == line || at[-1] == ' ') && at[length] == '=')
                        return at + length + 1;
        return 0;
}

uint64_t option_number(const char *name, uint64_t otherwise)
{
        const char *text = option_text(name);
        return text ? strtoull(text, 0, 10) : otherwise;
}
