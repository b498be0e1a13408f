/* A wall clock that is SKEW_S seconds off, for the processes of one host (LD_PRELOAD). Clocks that only go forward stay as they are, as on
 * a host whose wall clock is wrong; waits until a moment of the wall clock are moved with it. libfaketime has no such form: with its
 * FAKETIME_DONT_FAKE_MONOTONIC Python's time.sleep fails, and without it threading's waits hang. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t skew(void) {
    const char *text = getenv("SKEW_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    int status = syscall(SYS_clock_gettime, clock, out);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += skew();
    return status;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

/* A moment of the wall clock lies after 2001, one of a clock since boot does not. */
static struct timespec unskewed(const struct timespec *until) {
    struct timespec moved = *until;
    if (moved.tv_sec > 1000000000) moved.tv_sec -= skew();
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec moved = unskewed(until);
    return pthread_cond_clockwait(
        cond, mutex, until->tv_sec > 1000000000 ? CLOCK_REALTIME : CLOCK_MONOTONIC, &moved);
}

int sem_timedwait(sem_t *sem, const struct timespec *until) {
    struct timespec moved = unskewed(until);
    return sem_clockwait(sem, CLOCK_REALTIME, &moved);
}
