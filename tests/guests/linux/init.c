/* The first process of the Linux guest: mounts, loads the virtio modules, runs
 * the workloads that the kernel command line names, and says so if one ends.
 *
 * Command line: whimbrel.run=NAME[,NAME…] of memcheck, diocheck, discardcheck,
 * redis. Each has options of its own, at the head of its file. */

#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static const struct {
        const char *name;
        void (*run)(void);
} workloads[] = { { "memcheck", memcheck }, { "diocheck", diocheck }, { "discardcheck", discardcheck },
                  { "redis", redis } };

static void mount_all(void)
{
        mkdir("/proc", 0755), mkdir("/sys", 0755), mkdir("/dev", 0755), mkdir("/tmp", 01777);
        mount("proc", "/proc", "proc", 0, 0);
        mount("sys", "/sys", "sysfs", 0, 0);
        mount("dev", "/dev", "devtmpfs", 0, 0);
        mount("tmp", "/tmp", "tmpfs", 0, 0);
}

/* Lines as they are, each in one write. */
static void open_console(void)
{
        struct termios mode;
        int console = open("/dev/ttyS0", O_RDWR | O_NOCTTY);

        if (console < 0)
                return;
        tcgetattr(console, &mode);
        cfmakeraw(&mode);
        tcsetattr(console, TCSANOW, &mode);
        dup2(console, 0), dup2(console, 1), dup2(console, 2);
        setvbuf(stdout, 0, _IOLBF, 512);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
        return strcmp((*a)->d_name, (*b)->d_name);
}

/* The build numbered them in the order of their needs. */
static void load_modules(void)
{
        struct dirent **entries;
        int count = scandir("/modules", &entries, 0, by_name);

        for (int at = 0; at < count; at++) {
                char path[512];
                snprintf(path, sizeof path, "/modules/%s", entries[at]->d_name);
                int file = open(path, O_RDONLY);
                if (entries[at]->d_name[0] != '.' && syscall(SYS_finit_module, file, "", 0))
                        give_up(path);
                close(file);
        }
}

static void start(const char *name)
{
        for (size_t at = 0; at < sizeof workloads / sizeof *workloads; at++) {
                if (strcmp(workloads[at].name, name))
                        continue;
                pid_t pid = fork();
                if (pid == 0)
                        workloads[at].run();
                return;
        }
        printf("LOST no workload %s\n", name);
}

/* Disks are found after the module that knows them is loaded. */
static void wait_for_disk(void)
{
        const struct timespec pause = { 0, 10000000 };
        for (int attempt = 0; attempt < 200 && access("/dev/vda", F_OK); attempt++)
                nanosleep(&pause, 0);
}

int main(void)
{
        char list[256];
        const char *run;

        mount_all();
        open_console();
        load_modules();
        run = option_text("whimbrel.run");
        snprintf(list, sizeof list, "%.*s", (int)strcspn(run ? run : "", " \n"), run ? run : "");
        if (strstr(list, "diocheck"))
                wait_for_disk();
        printf("ready run=%s\n", list);
        for (char *name = strtok(list, ","); name; name = strtok(0, ","))
                start(name);
        for (;;) {
                int status;
                pid_t pid = wait(&status);
                if (pid < 0)
                        pause();
                else
                        printf("LOST a workload ended, with status %d\n", status);
        }
}
