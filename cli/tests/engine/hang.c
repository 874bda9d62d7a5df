/* Stands in for a file system whose server is gone, in a process that it is preloaded into: while the file $TEST_HANG exists, opening
   a file below the folder $TEST_HANG_BELOW does not return. The file $TEST_HANG.reached says that a call waits. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int (*open_call)(const char *, int, ...);

static void wait_for_server(const char *path) {
    const char *gate = getenv("TEST_HANG"), *below = getenv("TEST_HANG_BELOW");
    char reached[PATH_MAX];
    if (!gate || !below || strncmp(path, below, strlen(below)) != 0 || access(gate, F_OK) != 0)
        return;
    snprintf(reached, sizeof reached, "%s.reached", gate);
    mkdir(reached, 0700);
    while (access(gate, F_OK) == 0)
        usleep(5000);
}

static int call(const char *name, const char *path, int flags, mode_t mode) {
    wait_for_server(path);
    return ((open_call)dlsym(RTLD_NEXT, name))(path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return call("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return call("open64", path, flags, mode);
}
