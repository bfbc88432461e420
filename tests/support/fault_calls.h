/* The members of even_os (os/calls.h) that tests can make fail: one line each.
 * X(type, value on failure, name, parameters, arguments) */
#ifndef EVEN_TESTS_SUPPORT_FAULT_CALLS_H
#define EVEN_TESTS_SUPPORT_FAULT_CALLS_H

#include "os/calls.h"

#include <errno.h>
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
  X(int, -1, ftruncate, (int fd, off_t length), (fd, length))                                                          \
  X(int, -1, fstat, (int fd, struct stat *out), (fd, out))                                                             \
  X(int, -1, rename, (const char *from, const char *to), (from, to))                                                   \
  X(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))                                                     \
  X(int, -1, rmdir, (const char *path), (path))                                                                        \
  X(int, -1, unlink, (const char *path), (path))                                                                       \
  X(int, -1, exchange, (const char *a, const char *b), (a, b))                                                         \
  X(int, -1, flock, (int fd, int operation), (fd, operation))                                                          \
  X(ssize_t, -1, getdents64, (int fd, void *buffer, size_t bytes), (fd, buffer, bytes))                                \
  X(void *, MAP_FAILED, mmap, (void *address, size_t bytes, int protection, int flags, int fd, off_t offset),          \
    (address, bytes, protection, flags, fd, offset))                                                                   \
  X(int, -1, munmap, (void *address, size_t bytes), (address, bytes))                                                  \
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
  X(int, EAGAIN, thread_create,                                                                                        \
    (pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument),                      \
    (thread, attributes, body, argument))
/* clang-format on */

#endif
