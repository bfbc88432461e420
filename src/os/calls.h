/* Every call to the kernel goes through this table, so that a test can make any
 * of them fail. Only src/os reads it; only tests write to it. A new call is a
 * new member here and its default in calls.c. */
#ifndef EVEN_OS_CALLS_H
#define EVEN_OS_CALLS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

struct ifaddrs;
struct rlimit;
struct statvfs;
struct utsname;

typedef struct even_os_calls {
  int (*open)(const char *path, int flags, mode_t mode);
  int (*close)(int fd);
  int (*duplicate)(int fd); /* close-on-exec */
  ssize_t (*read)(int fd, void *buffer, size_t bytes);
  ssize_t (*write)(int fd, const void *buffer, size_t bytes);
  ssize_t (*pread)(int fd, void *buffer, size_t bytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void *buffer, size_t bytes, off_t offset);
  int (*fsync)(int fd);
  int (*ftruncate)(int fd, off_t length);
  int (*fstat)(int fd, struct stat *out);
  int (*rename)(const char *from, const char *to);
  int (*mkdir)(const char *path, mode_t mode);
  int (*rmdir)(const char *path);
  int (*unlink)(const char *path);
  int (*exchange)(const char *a, const char *b); /* renameat2 with RENAME_EXCHANGE */
  int (*flock)(int fd, int operation);
  ssize_t (*getdents64)(int fd, void *buffer, size_t bytes);
  void *(*mmap)(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
  int (*munmap)(void *address, size_t bytes);
  int (*memfd_create)(const char *name, unsigned int flags);
  long (*futex)(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout);
  int (*pidfd_open)(pid_t pid, unsigned int flags);
  int (*clock_gettime)(clockid_t clock, struct timespec *out);
  void *(*dlopen)(const char *name, int flags);
  void *(*dlsym)(void *handle, const char *name);
  int (*dlclose)(void *handle);
  int (*uname)(struct utsname *out);
  int (*statvfs)(const char *path, struct statvfs *out);
  int (*getifaddrs)(struct ifaddrs **out); /* freed with freeifaddrs */
  int (*getrlimit)(int resource, struct rlimit *out);
} even_os_calls;

extern even_os_calls even_os;

/* The table with the real calls; a test copies it back after an injected fault. */
extern const even_os_calls even_os_real;

#endif
