/* The real system calls. */
#include "os/calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

static int real_open(const char *path, int flags, mode_t mode) {
  return open(path, flags, mode);
}
static int real_duplicate(int fd) {
  return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}
static int real_fstat(int fd, struct stat *out) {
  return fstat(fd, out);
}

/* glibc's prototype has an enumeration of its own */
static int real_getrlimit(int resource, struct rlimit *out) {
  return getrlimit((__rlimit_resource_t)resource, out);
}

static long real_futex(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

static int real_pidfd_open(pid_t pid, unsigned int flags) {
  return (int)syscall(SYS_pidfd_open, pid, flags);
}

static int real_exchange(const char *a, const char *b) {
  return renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE);
}

static int real_memfd_create(const char *name, unsigned int flags) {
  return memfd_create(name, flags);
}

#define REAL_CALLS                    \
  {.open = real_open,                 \
   .close = close,                    \
   .duplicate = real_duplicate,       \
   .read = read,                      \
   .write = write,                    \
   .pread = pread,                    \
   .pwrite = pwrite,                  \
   .fsync = fsync,                    \
   .ftruncate = ftruncate,            \
   .fstat = real_fstat,               \
   .rename = rename,                  \
   .mkdir = mkdir,                    \
   .rmdir = rmdir,                    \
   .unlink = unlink,                  \
   .exchange = real_exchange,         \
   .flock = flock,                    \
   .getdents64 = getdents64,          \
   .mmap = mmap,                      \
   .munmap = munmap,                  \
   .memfd_create = real_memfd_create, \
   .futex = real_futex,               \
   .pidfd_open = real_pidfd_open,     \
   .clock_gettime = clock_gettime,    \
   .dlopen = dlopen,                  \
   .dlsym = dlsym,                    \
   .dlclose = dlclose,                \
   .uname = uname,                    \
   .statvfs = statvfs,                \
   .getifaddrs = getifaddrs,          \
   .getrlimit = real_getrlimit}

even_os_calls even_os = REAL_CALLS;
const even_os_calls even_os_real = REAL_CALLS;
