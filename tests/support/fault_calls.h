/* The members of even_os (os/calls.h) that tests can make fail: one line each.
 * X(type, value on failure, name, parameters, arguments) */
#ifndef EVEN_TESTS_SUPPORT_FAULT_CALLS_H
#define EVEN_TESTS_SUPPORT_FAULT_CALLS_H

#include "os/calls.h"

#include <errno.h>
#include <netdb.h>
#include <sys/mman.h>

/* clang-format off */
#define FAULT_CALL_LIST(X)                                                                                             \
  X(int, -1, open, (const char *path, int flags, mode_t mode), (path, flags, mode))                                    \
  X(int, -1, close, (int fd), (fd))                                                                                    \
  X(ssize_t, -1, read, (int fd, void *buffer, size_t bytes), (fd, buffer, fault_short(bytes)))                         \
  X(ssize_t, -1, write, (int fd, const void *buffer, size_t bytes), (fd, buffer, fault_short(bytes)))                  \
  X(ssize_t, -1, pread, (int fd, void *buffer, size_t bytes, off_t offset), (fd, buffer, fault_short(bytes), offset))  \
  X(ssize_t, -1, pwrite, (int fd, const void *buffer, size_t bytes, off_t offset),                                     \
    (fd, buffer, fault_short(bytes), offset))                                                                          \
  X(int, -1, fsync, (int fd), (fd))                                                                                    \
  X(int, -1, touch, (int fd), (fd))                                                                                    \
  X(int, -1, ftruncate, (int fd, off_t length), (fd, length))                                                          \
  X(int, -1, fallocate, (int fd, int mode, off_t offset, off_t bytes), (fd, mode, offset, bytes))                      \
  X(int, -1, fstatfs, (int fd, struct statfs *out), (fd, out))                                                          \
  X(int, -1, link, (const char *from, const char *to), (from, to))                                                     \
  X(int, -1, ioctl, (int fd, unsigned long request, void *argument), (fd, request, argument))                          \
  X(int, -1, fstat, (int fd, struct stat *out), (fd, out))                                                             \
  X(int, -1, rename, (const char *from, const char *to), (from, to))                                                   \
  X(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))                                                     \
  X(int, -1, rmdir, (const char *path), (path))                                                                        \
  X(int, -1, unlink, (const char *path), (path))                                                                       \
  X(int, -1, unlinkat, (int folder, const char *name, int flags), (folder, name, flags))                                 \
  X(int, -1, exchange, (const char *a, const char *b), (a, b))                                                         \
  X(int, -1, flock, (int fd, int operation), (fd, operation))                                                          \
  X(ssize_t, -1, getdents64, (int fd, void *buffer, size_t bytes), (fd, buffer, bytes))                                \
  X(void *, MAP_FAILED, mmap, (void *address, size_t bytes, int protection, int flags, int fd, off_t offset),          \
    (address, bytes, protection, flags, fd, offset))                                                                   \
  X(int, -1, munmap, (void *address, size_t bytes), (address, bytes))                                                  \
  X(int, -1, madvise, (void *address, size_t bytes, int advice), (address, bytes, advice)) \
  X(int, -1, mincore, (void *address, size_t bytes, unsigned char *pages), (address, bytes, pages)) \
  X(long, -1, mbind,                                                                                                   \
    (void *address, size_t bytes, int mode, const unsigned long *nodes, unsigned long most, unsigned flags),           \
    (address, bytes, mode, nodes, most, flags))                                                                        \
  X(long, -1, get_mempolicy,                                                                                           \
    (int *mode, unsigned long *nodes, unsigned long most, void *address, unsigned long flags),                         \
    (mode, nodes, most, address, flags))                                                                               \
  X(int, -1, memfd_create, (const char *name, unsigned int flags), (name, flags))                                      \
  X(long, -1, futex, (uint32_t *word, int operation, uint32_t value, const struct timespec *timeout),                  \
    (word, operation, value, timeout))                                                                                 \
  X(int, -1, pidfd_open, (pid_t pid, unsigned int flags), (pid, flags))                                                \
  X(int, -1, clock_gettime, (clockid_t clock, struct timespec *out), (clock, out))                                     \
  X(void *, NULL, dlopen, (const char *name, int flags), (name, flags))                                                \
  X(void *, NULL, dlsym, (void *handle, const char *name), (handle, name))                                             \
  X(int, -1, uname, (struct utsname *out), (out))                                                                      \
  X(int, -1, statvfs, (const char *path, struct statvfs *out), (path, out))                                            \
  X(int, -1, getifaddrs, (struct ifaddrs **out), (out))                                                                \
  X(int, -1, getrlimit, (int resource, struct rlimit *out), (resource, out))                                           \
  X(int, -1, setrlimit, (int resource, const struct rlimit *limit), (resource, limit))                                 \
  X(int, -1, prlimit, (pid_t pid, int resource, const struct rlimit *limit, struct rlimit *before),                    \
    (pid, resource, limit, before))                                                                                    \
  X(int, EAGAIN, thread_create,                                                                                        \
    (pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument),                      \
    (thread, attributes, body, argument))                                                                              \
  X(int, -1, at_exit, (void (*call)(void)), (call))                                                                    \
  X(int, -1, setpriority, (int nice), (nice))                                                                          \
  X(int, -1, getpriority, (int *nice), (nice))                                                                         \
  X(int, -1, reset_on_fork, (void), ())                                                                                \
  X(pid_t, -1, fork, (void), ())                                                                                       \
  X(int, -1, execvpe, (const char *file, char *const *words, char *const *lines), (file, words, lines))                \
  X(pid_t, -1, setsid, (void), ())                                                                                     \
  X(int, -1, prctl, (int option, unsigned long argument), (option, argument))                                          \
  X(int, -1, setaffinity, (pid_t pid, size_t bytes, const void *mask), (pid, bytes, mask))                             \
  X(int, -1, signalfd, (int fd, const sigset_t *set, int flags), (fd, set, flags))                                     \
  X(int, -1, pipe2, (int ends[2], int flags), (ends, flags))                                                           \
  X(int, -1, dup2, (int from, int to), (from, to))                                                                     \
  X(int, -1, fcntl, (int fd, int command, int argument), (fd, command, argument))                                      \
  X(int, -1, close_range, (unsigned int first, unsigned int last), (first, last))                                      \
  X(ssize_t, -1, readlink, (const char *path, char *buffer, size_t bytes), (path, buffer, bytes))                      \
  X(char *, NULL, getcwd, (char *buffer, size_t bytes), (buffer, bytes))                                               \
  X(int, -1, chdir, (const char *path), (path))                                                                        \
  X(int, -1, epoll_create1, (int flags), (flags))                                                                      \
  X(int, -1, epoll_ctl, (int epoll, int operation, int fd, struct epoll_event *event), (epoll, operation, fd, event))  \
  X(int, -1, epoll_wait, (int epoll, struct epoll_event *events, int count, int timeout_ms),                           \
    (epoll, events, count, timeout_ms))                                                                                \
  X(int, -1, poll, (struct pollfd *descriptors, nfds_t count, int timeout_ms), (descriptors, count, timeout_ms))       \
  X(int, -1, sigqueue, (pid_t pid, int signal), (pid, signal))                                                         \
  X(int, -1, socket, (int domain, int type, int protocol), (domain, type, protocol))                                   \
  X(int, -1, socketpair, (int domain, int type, int protocol, int ends[2]), (domain, type, protocol, ends))            \
  X(ssize_t, -1, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))                     \
  X(ssize_t, -1, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))                           \
  X(int, -1, listen, (int fd, int backlog), (fd, backlog))                                                             \
  X(int, -1, setsockopt, (int fd, int level, int option, const void *value, socklen_t bytes),                          \
    (fd, level, option, value, bytes))                                                                                 \
  X(int, -1, bind, (int fd, const struct sockaddr *address, socklen_t bytes), (fd, address, bytes))                    \
  X(int, -1, connect, (int fd, const struct sockaddr *address, socklen_t bytes), (fd, address, bytes))                 \
  X(int, -1, getsockname, (int fd, struct sockaddr *address, socklen_t *bytes), (fd, address, bytes))                  \
  X(int, -1, getpeername, (int fd, struct sockaddr *address, socklen_t *bytes), (fd, address, bytes))                  \
  X(int, -1, accept4, (int fd, struct sockaddr *address, socklen_t *bytes, int flags), (fd, address, bytes, flags))    \
  X(int, EAI_SYSTEM, getaddrinfo,                                                                                      \
    (const char *name, const char *service, const struct addrinfo *wanted, struct addrinfo **out),                     \
    (name, service, wanted, out))                                                                                      \
  X(int, -1, getsockopt, (int fd, int level, int option, void *value, socklen_t *bytes),                               \
    (fd, level, option, value, bytes))                                                                                 \
  X(int, -1, setns, (int fd), (fd))                                                                                    \
  X(ssize_t, -1, getrandom, (void *buffer, size_t bytes, unsigned int flags), (buffer, bytes, flags))
/* clang-format on */

#endif
