/* Stands between a program and its files: pread and preadv on descriptors of one file misbehave as told by the environment.
   MOEFLUX_SHIM_FILE: what the path must contain. MOEFLUX_SHIM_MODE: eio, eintr, eagain, einval_direct, short, odd_short.
   MOEFLUX_SHIM_TIMES: how often (default always). Mode sometimes: of 1,024 reads, so many fail as moeflux_shim_rate says, or
   MOEFLUX_SHIM_RATE as long as there is a file MOEFLUX_SHIM_WHEN. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long used;
static atomic_int rate;
static atomic_uint random_state = 1;

void moeflux_shim_rate(int of_1024) { atomic_store(&rate, of_1024); }

static int is_unlucky(void) {
    unsigned old = atomic_load(&random_state), next;
    do next = old * 1664525u + 1013904223u;
    while (!atomic_compare_exchange_weak(&random_state, &old, next));
    return (int)(next >> 22) < atomic_load(&rate);
}

static int is_target(int fd) {
    const char *wanted = getenv("MOEFLUX_SHIM_FILE");
    char link[64], path[4096];
    if (!wanted) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, wanted) != NULL;
}

/* 0: read as asked. -1: fail with errno. Else: read only so many bytes. */
static ssize_t decide(int fd, size_t n) {
    if (!is_target(fd)) return 0;
    const char *mode = getenv("MOEFLUX_SHIM_MODE"), *times = getenv("MOEFLUX_SHIM_TIMES");
    if (!mode) return 0;
    if (strcmp(mode, "einval_direct") == 0) {
        if (!(fcntl(fd, F_GETFL) & O_DIRECT)) return 0;
        errno = EINVAL;
        return -1;
    }
    if (strcmp(mode, "sometimes") == 0) {
        const char *wanted = getenv("MOEFLUX_SHIM_RATE"), *when = getenv("MOEFLUX_SHIM_WHEN");
        if (wanted && when) moeflux_shim_rate(access(when, F_OK) == 0 ? atoi(wanted) : 0);
        errno = EIO;
        return is_unlucky() ? -1 : 0;
    }
    if (times && atomic_fetch_add(&used, 1) >= atol(times)) return 0;
    errno = strcmp(mode, "eio") == 0 ? EIO : strcmp(mode, "eintr") == 0 ? EINTR : strcmp(mode, "eagain") == 0 ? EAGAIN : 0;
    if (errno) return -1;
    if (strcmp(mode, "short") == 0 && n > 4096) return 4096;
    if (strcmp(mode, "odd_short") == 0 && n > 1) return (ssize_t)(n / 2 + 1 < 5000 ? n / 2 + 1 : 5000);
    return 0;
}

/* A short read of a descriptor past the page cache: all of it into memory of our own, a part of it to the caller. */
static ssize_t read_part(int fd, void *to, size_t n, size_t part, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    if (part == 0) return real(fd, to, n, offset);
    void *whole = NULL;
    if (posix_memalign(&whole, 4096, n)) return -1;
    ssize_t got = real(fd, whole, n, offset);
    if (got > (ssize_t)part) got = (ssize_t)part;
    if (got > 0) memcpy(to, whole, (size_t)got);
    free(whole);
    return got;
}

ssize_t pread(int fd, void *to, size_t n, off_t offset) {
    ssize_t part = decide(fd, n);
    return part < 0 ? -1 : read_part(fd, to, n, (size_t)part, offset);
}

ssize_t pread64(int fd, void *to, size_t n, off_t offset) { return pread(fd, to, n, offset); }

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    if (count != 1) abort();
    return pread(fd, parts[0].iov_base, parts[0].iov_len, offset);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t offset) { return preadv(fd, parts, count, offset); }

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    (void)flags;
    return preadv(fd, parts, count, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return preadv2(fd, parts, count, offset, flags);
}
