/* Starts Debian's redis-server and keeps reading and writing keys; every value
 * follows from its key and a generation that the client remembers. Options:
 * redis_keys=N (default 500), redis_rate=N (keys per second; 1000). */

#define _GNU_SOURCE
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define SOCKET_PATH "/tmp/redis.sock"

enum { VALUE_WORDS = 64, VALUE_BYTES = VALUE_WORDS * 8 };

static struct report report = { .who = "redis" };
static FILE *server;

static void start_server(void)
{
        if (fork() == 0) {
                execl("/usr/bin/redis-server", "redis-server", "--port", "0", "--unixsocket", SOCKET_PATH, "--save",
                      "", "--appendonly", "no", "--dir", "/tmp", "--logfile", "/dev/null", (char *)0);
                give_up("redis-server");
        }
}

static FILE *connect_to_server(void)
{
        const struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = SOCKET_PATH };
        const struct timespec pause = { 0, 50000000 };

        for (int attempt = 0; attempt < 1200; attempt++) {
                int connection = socket(AF_UNIX, SOCK_STREAM, 0);
                if (connect(connection, (const struct sockaddr *)&address, sizeof address) == 0)
                        return fdopen(connection, "r+");
                close(connection);
                nanosleep(&pause, 0);
        }
        give_up("connect to redis-server");
}

static void fill_value(uint64_t *value, uint64_t key, uint64_t generation)
{
        for (int at = 0; at < VALUE_WORDS; at++)
                value[at] = mixed(key << 40 ^ generation << 8 ^ at);
}

/* The length that a reply announces, as in "$512"; -1 for a key that is not there. */
static long read_length(void)
{
        char line[64];
        if (!fgets(line, sizeof line, server) || line[0] != '$')
                give_up("reply of redis-server");
        return strtol(line + 1, 0, 10);
}

static void set(uint64_t key, uint64_t generation)
{
        uint64_t value[VALUE_WORDS];
        char reply[64];

        fill_value(value, key, generation);
        fprintf(server, "*3\r\n$3\r\nSET\r\n$8\r\n%08lu\r\n$%d\r\n", key, VALUE_BYTES);
        fwrite(value, VALUE_BYTES, 1, server);
        fprintf(server, "\r\n");
        fflush(server);
        if (!fgets(reply, sizeof reply, server) || strcmp(reply, "+OK\r\n"))
                give_up("SET");
        report.writes++;
}

static void get(uint64_t key, uint64_t generation)
{
        uint64_t want[VALUE_WORDS], got[VALUE_WORDS + 1];

        fprintf(server, "*2\r\n$3\r\nGET\r\n$8\r\n%08lu\r\n", key);
        fflush(server);
        report.visits++;
        long length = read_length();
        if (length < 0) {
                report_lost(&report, key, generation, 0, "no-such-key");
                return;
        }
        if (length != VALUE_BYTES || fread(got, VALUE_BYTES + 2, 1, server) != 1)
                give_up("GET");
        fill_value(want, key, generation);
        if (memcmp(want, got, VALUE_BYTES))
                report_lost(&report, key, generation, got[0], "value");
}

void redis(void)
{
        uint64_t keys = option_number("redis_keys", 500);
        uint64_t rate = option_number("redis_rate", 1000);

        start_server();
        server = connect_to_server();
        for (uint64_t key = 0; key < keys; key++)
                set(key, 0);
        for (;; report.lap++) {
                for (uint64_t key = 0; key < keys; key++) {
                        get(key, report.lap);
                        set(key, report.lap + 1);
                        report_beat(&report);
                        keep_pace(rate);
                }
        }
}
