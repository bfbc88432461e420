/* The real system calls. */
#include "os/calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/futex.h>
#include <netdb.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <termios.h>
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

static int real_fstatfs(int fd, struct statfs *out) {
  return fstatfs(fd, out);
}

/* glibc's prototype has an enumeration of its own */
static int real_getrlimit(int resource, struct rlimit *out) {
  return getrlimit((__rlimit_resource_t)resource, out);
}
static int real_setrlimit(int resource, const struct rlimit *limit) {
  return setrlimit((__rlimit_resource_t)resource, limit);
}
static int real_prlimit(pid_t pid, int resource, const struct rlimit *limit, struct rlimit *before) {
  return prlimit(pid, (__rlimit_resource_t)resource, limit, before);
}

static long real_futex(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

static long real_mbind(void *address, size_t bytes, int mode, const unsigned long *nodes, unsigned long most,
                       unsigned flags) {
  return syscall(SYS_mbind, address, bytes, mode, nodes, most, flags);
}
static long real_get_mempolicy(int *mode, unsigned long *nodes, unsigned long most, void *address,
                               unsigned long flags) {
  return syscall(SYS_get_mempolicy, mode, nodes, most, address, flags);
}

static int real_pidfd_open(pid_t pid, unsigned int flags) {
  return (int)syscall(SYS_pidfd_open, pid, flags);
}

static int real_exchange(const char *a, const char *b) {
  return renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE);
}

static int real_pidfd_send_signal(int pidfd, int number) {
  return (int)syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0);
}

static int real_memfd_create(const char *name, unsigned int flags) {
  return memfd_create(name, flags);
}

static int real_execvpe(const char *file, char *const *arguments, char *const *environment) {
  return execvpe(file, arguments, environment);
}
static void real_exit(int code) {
  _exit(code);
}
static pid_t real_wait4(pid_t pid, int *status, int options, struct rusage *usage) {
  return wait4(pid, status, options, usage);
}
static int real_tgkill(pid_t process, pid_t thread, int number) {
  return (int)syscall(SYS_tgkill, process, thread, number);
}
static pid_t real_gettid(void) {
  return (pid_t)syscall(SYS_gettid);
}
static int real_prctl(int option, unsigned long argument) {
  return prctl(option, argument, 0, 0, 0);
}
static int real_setaffinity(pid_t pid, size_t bytes, const void *mask) {
  return sched_setaffinity(pid, bytes, mask);
}
static int real_setpriority(int nice_value) {
  return setpriority(PRIO_PROCESS, 0, nice_value);
}
static int real_getpriority(int *nice_value) {
  errno = 0; /* -1 is a priority */
  *nice_value = getpriority(PRIO_PROCESS, 0);
  return *nice_value == -1 && errno != 0 ? -1 : 0;
}
static int real_reset_on_fork(void) {
  const struct sched_param usual = {.sched_priority = 0};
  int policy = sched_getscheduler(0);
  return policy < 0 ? -1 : sched_setscheduler(0, policy | SCHED_RESET_ON_FORK, &usual);
}
static int real_sigqueue(pid_t pid, int signal) {
  return sigqueue(pid, signal, (union sigval){.sival_int = 0});
}
static int real_setns(int fd) {
  return setns(fd, CLONE_NEWNET);
}
static int real_fcntl(int fd, int command, int argument) {
  return fcntl(fd, command, argument);
}
static int real_ioctl(int fd, unsigned long request, void *argument) {
  return ioctl(fd, request, argument);
}
static int real_close_range(unsigned int first, unsigned int last) {
  return (int)syscall(SYS_close_range, first, last, 0);
}
static int real_listen(int fd, int backlog) {
  return listen(fd, backlog);
}
static int real_setsockopt(int fd, int level, int option, const void *value, socklen_t bytes) {
  return setsockopt(fd, level, option, value, bytes);
}
static int real_bind(int fd, const struct sockaddr *address, socklen_t bytes) {
  return bind(fd, address, bytes);
}
static int real_connect(int fd, const struct sockaddr *address, socklen_t bytes) {
  return connect(fd, address, bytes);
}
static int real_getsockname(int fd, struct sockaddr *address, socklen_t *bytes) {
  return getsockname(fd, address, bytes);
}
static int real_getpeername(int fd, struct sockaddr *address, socklen_t *bytes) {
  return getpeername(fd, address, bytes);
}
static int real_accept4(int fd, struct sockaddr *address, socklen_t *bytes, int flags) {
  return accept4(fd, address, bytes, flags);
}
static int real_getsockopt(int fd, int level, int option, void *value, socklen_t *bytes) {
  return getsockopt(fd, level, option, value, bytes);
}
static int real_touch(int fd) {
  return futimens(fd, NULL);
}
static int real_nanosleep(const struct timespec *time) {
  return nanosleep(time, NULL);
}

#define REAL_CALLS                              \
  {.open = real_open,                           \
   .close = close,                              \
   .duplicate = real_duplicate,                 \
   .read = read,                                \
   .write = write,                              \
   .pread = pread,                              \
   .pwrite = pwrite,                            \
   .fsync = fsync,                              \
   .ftruncate = ftruncate,                      \
   .fchmod = fchmod,                            \
   .touch = real_touch,                         \
   .fallocate = fallocate,                      \
   .fstat = real_fstat,                         \
   .fstatfs = real_fstatfs,                     \
   .link = link,                                \
   .rename = rename,                            \
   .mkdir = mkdir,                              \
   .rmdir = rmdir,                              \
   .unlink = unlink,                            \
   .unlinkat = unlinkat,                        \
   .geteuid = geteuid,                          \
   .exchange = real_exchange,                   \
   .flock = flock,                              \
   .getdents64 = getdents64,                    \
   .mmap = mmap,                                \
   .munmap = munmap,                            \
   .madvise = madvise,                          \
   .mincore = mincore,                          \
   .mbind = real_mbind,                         \
   .get_mempolicy = real_get_mempolicy,         \
   .memfd_create = real_memfd_create,           \
   .futex = real_futex,                         \
   .sched_yield = sched_yield,                  \
   .pidfd_open = real_pidfd_open,               \
   .pidfd_send_signal = real_pidfd_send_signal, \
   .clock_gettime = clock_gettime,              \
   .dlopen = dlopen,                            \
   .dlsym = dlsym,                              \
   .dlclose = dlclose,                          \
   .uname = uname,                              \
   .statvfs = statvfs,                          \
   .getifaddrs = getifaddrs,                    \
   .getrlimit = real_getrlimit,                 \
   .setrlimit = real_setrlimit,                 \
   .prlimit = real_prlimit,                     \
   .fork = fork,                                \
   .execvpe = real_execvpe,                     \
   .exit = real_exit,                           \
   .at_exit = atexit,                           \
   .wait4 = real_wait4,                         \
   .kill = kill,                                \
   .sigqueue = real_sigqueue,                   \
   .tgkill = real_tgkill,                       \
   .gettid = real_gettid,                       \
   .getpid = getpid,                            \
   .getppid = getppid,                          \
   .sysconf = sysconf,                          \
   .setsid = setsid,                            \
   .prctl = real_prctl,                         \
   .setaffinity = real_setaffinity,             \
   .setpriority = real_setpriority,             \
   .getpriority = real_getpriority,             \
   .reset_on_fork = real_reset_on_fork,         \
   .mask_signals = pthread_sigmask,             \
   .pending_signals = sigpending,               \
   .sigaction = sigaction,                      \
   .signalfd = signalfd,                        \
   .thread_create = pthread_create,             \
   .pipe2 = pipe2,                              \
   .isatty = isatty,                            \
   .tcgetattr = tcgetattr,                      \
   .tcsetattr = tcsetattr,                      \
   .ioctl = real_ioctl,                         \
   .dup2 = dup2,                                \
   .fcntl = real_fcntl,                         \
   .close_range = real_close_range,             \
   .lseek = lseek,                              \
   .access = access,                            \
   .readlink = readlink,                        \
   .setns = real_setns,                         \
   .getcwd = getcwd,                            \
   .chdir = chdir,                              \
   .epoll_create1 = epoll_create1,              \
   .epoll_ctl = epoll_ctl,                      \
   .epoll_wait = epoll_wait,                    \
   .poll = poll,                                \
   .socket = socket,                            \
   .socketpair = socketpair,                    \
   .sendmsg = sendmsg,                          \
   .recvmsg = recvmsg,                          \
   .bind = real_bind,                           \
   .listen = real_listen,                       \
   .setsockopt = real_setsockopt,               \
   .connect = real_connect,                     \
   .getsockname = real_getsockname,             \
   .getpeername = real_getpeername,             \
   .accept4 = real_accept4,                     \
   .getsockopt = real_getsockopt,               \
   .getaddrinfo = getaddrinfo,                  \
   .getrandom = getrandom,                      \
   .nanosleep = real_nanosleep}

even_os_calls even_os = REAL_CALLS;
const even_os_calls even_os_real = REAL_CALLS;
