/* Functions that wait without libfaketime. While one of libfaketime's own functions
   waits, a signal handler that interrupts it sees the true time. PostgreSQL's SIGALRM
   handler compares that time with the end of every timeout: with a clock behind, all of
   them would expire with the first; with a clock ahead, none would. Processes that the
   postmaster forks in a handler (up to PostgreSQL 15, all background workers) would see
   the true time forever. A wait for a length of time needs no clock. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>

static void *in_libc(const char *name)
{
    static void *libc;

    if (libc == NULL)
        libc = dlopen("libc.so.6", RTLD_LAZY);
    return dlsym(libc, name);
}

int epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout)
{
    static int (*real)(int, struct epoll_event *, int, int);

    if (real == NULL)
        real = in_libc("epoll_wait");
    return real(epfd, events, maxevents, timeout);
}

int poll(struct pollfd *fds, nfds_t nfds, int timeout)
{
    static int (*real)(struct pollfd *, nfds_t, int);

    if (real == NULL)
        real = in_libc("poll");
    return real(fds, nfds, timeout);
}

int select(int nfds, fd_set *readfds, fd_set *writefds, fd_set *exceptfds,
           struct timeval *timeout)
{
    static int (*real)(int, fd_set *, fd_set *, fd_set *, struct timeval *);

    if (real == NULL)
        real = in_libc("select");
    return real(nfds, readfds, writefds, exceptfds, timeout);
}

int nanosleep(const struct timespec *duration, struct timespec *rest)
{
    static int (*real)(const struct timespec *, struct timespec *);

    if (real == NULL)
        real = in_libc("nanosleep");
    return real(duration, rest);
}
