/* Reads /dev/vda with O_DIRECT in several threads, each into many buffers in
 * turn. A buffer is verified when its read completes, and once more before it is
 * used again, much later: data that a device wrote but a migration did not
 * carry over is stale by then. Options: readers=N (default 8), buffers=N (per
 * reader; 8), chunk_kib=N (bytes per read; 256). */

#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <linux/fs.h>
#include <unistd.h>

enum { READERS_MAX = 64, SECTOR = 512 };

/* What one thread has done, for the one that reports. */
struct reader {
        pthread_t thread;
        uint64_t seed;
        atomic_ulong pages_verified, reads, laps, lost;
};

static struct report report = { .who = "diocheck" };
static struct reader readers[READERS_MAX];
static uint64_t chunk_bytes, buffer_count, disk_bytes;
static pthread_mutex_t reporting = PTHREAD_MUTEX_INITIALIZER;

/* A buffer, and where on the disk its content came from. */
struct buffer {
        uint64_t *words;
        uint64_t disk_offset;
        int is_full;
};

static void verify(struct reader *reader, const struct buffer *buffer, const char *when)
{
        for (uint64_t at = 0; at < chunk_bytes / 8; at += PAGE_WORDS) {
                uint64_t first = buffer->disk_offset / 8 + at;
                uint64_t word = 0;
                while (word < PAGE_WORDS && buffer->words[at + word] == mixed(first + word))
                        word++;
                atomic_fetch_add(&reader->pages_verified, 1);
                if (word == PAGE_WORDS)
                        continue;
                pthread_mutex_lock(&reporting);
                report_lost(&report, first / PAGE_WORDS, mixed(first + word), buffer->words[at + word], when);
                pthread_mutex_unlock(&reporting);
        }
}

static void *read_for_ever(void *argument)
{
        struct reader *reader = argument;
        struct buffer *buffers = map_memory(buffer_count * sizeof *buffers);
        int disk = open("/dev/vda", O_RDONLY | O_DIRECT);

        if (disk < 0)
                give_up("/dev/vda");
        for (uint64_t at = 0; at < buffer_count; at++)
                buffers[at].words = map_memory(chunk_bytes);
        for (;;) {
                for (uint64_t at = 0; at < buffer_count; at++) {
                        struct buffer *buffer = &buffers[at];
                        if (buffer->is_full)
                                verify(reader, buffer, "later");
                        buffer->disk_offset =
                                random_number(&reader->seed) % (disk_bytes / chunk_bytes) * chunk_bytes;
                        ssize_t got = pread(disk, buffer->words, chunk_bytes, buffer->disk_offset);
                        if (got != (ssize_t)chunk_bytes)
                                give_up("pread of /dev/vda");
                        buffer->is_full = 1;
                        verify(reader, buffer, "at-once");
                        atomic_fetch_add(&reader->reads, 1);
                }
                atomic_fetch_add(&reader->laps, 1);
        }
}

/* Adds up what the readers have done. A lap is done when all have done it. */
static void collect(uint64_t reader_count)
{
        uint64_t visits = 0, reads = 0, laps = ~0ull;

        for (uint64_t at = 0; at < reader_count; at++) {
                uint64_t own = atomic_load(&readers[at].laps);
                visits += atomic_load(&readers[at].pages_verified);
                reads += atomic_load(&readers[at].reads);
                laps = own < laps ? own : laps;
        }
        report.visits = visits;
        report.writes = reads;
        report.lap = laps;
}

void diocheck(void)
{
        const struct timespec pause = { 0, 20000000 };
        uint64_t reader_count = option_number("readers", 8);
        int disk = open("/dev/vda", O_RDONLY);

        if (disk < 0 || ioctl(disk, BLKGETSIZE64, &disk_bytes) < 0)
                give_up("/dev/vda");
        reader_count = reader_count < READERS_MAX ? reader_count : READERS_MAX;
        chunk_bytes = option_number("chunk_kib", 256) * 1024;
        buffer_count = option_number("buffers", 8);
        for (uint64_t at = 0; at < reader_count; at++) {
                readers[at].seed = at + 1;
                if (pthread_create(&readers[at].thread, 0, read_for_ever, &readers[at]))
                        give_up("pthread_create");
        }
        for (;;) {
                collect(reader_count);
                pthread_mutex_lock(&reporting);
                report_beat(&report);
                pthread_mutex_unlock(&reporting);
                nanosleep(&pause, 0);
        }
}
