/* Every call to the kernel goes through this table, so that a test can make any
 * of them fail. Only src/os reads it; only tests write to it. A new call is a
 * new member here and its default in calls.c. */
#ifndef EVEN_OS_CALLS_H
#define EVEN_OS_CALLS_H

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

struct addrinfo;
struct ifaddrs;
struct rlimit;
struct statfs;
struct statvfs;
struct termios;
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
  int (*fchmod)(int fd, mode_t mode);
  int (*touch)(int fd); /* futimens: its times are now, by the clock of its file system */
  int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
  int (*fstat)(int fd, struct stat *out);
  int (*fstatfs)(int fd, struct statfs *out);
  int (*rename)(const char *from, const char *to);
  int (*link)(const char *from, const char *to); /* a second name for a file; of a symbolic link, for itself */
  int (*mkdir)(const char *path, mode_t mode);
  int (*rmdir)(const char *path);
  int (*unlink)(const char *path);
  int (*unlinkat)(int folder, const char *name, int flags);
  uid_t (*geteuid)(void);
  int (*exchange)(const char *a, const char *b); /* renameat2 with RENAME_EXCHANGE */
  int (*flock)(int fd, int operation);
  ssize_t (*getdents64)(int fd, void *buffer, size_t bytes);
  void *(*mmap)(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
  int (*munmap)(void *address, size_t bytes);
  int (*madvise)(void *address, size_t bytes, int advice);
  int (*mincore)(void *address, size_t bytes, unsigned char *pages);
  /* where pages are taken from: mempolicy.h */
  long (*mbind)(void *address, size_t bytes, int mode, const unsigned long *nodes, unsigned long most, unsigned flags);
  long (*get_mempolicy)(int *mode, unsigned long *nodes, unsigned long most, void *address, unsigned long flags);
  int (*memfd_create)(const char *name, unsigned int flags);
  long (*futex)(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout);
  int (*sched_yield)(void);
  int (*pidfd_open)(pid_t pid, unsigned int flags);
  int (*pidfd_send_signal)(int pidfd, int signal);
  int (*clock_gettime)(clockid_t clock, struct timespec *out);
  void *(*dlopen)(const char *name, int flags);
  void *(*dlsym)(void *handle, const char *name);
  int (*dlclose)(void *handle);
  int (*uname)(struct utsname *out);
  int (*statvfs)(const char *path, struct statvfs *out);
  int (*getifaddrs)(struct ifaddrs **out); /* freed with freeifaddrs */
  int (*getrlimit)(int resource, struct rlimit *out);
  int (*setrlimit)(int resource, const struct rlimit *limit);
  int (*prlimit)(pid_t pid, int resource, const struct rlimit *limit, struct rlimit *before);
  /* processes and their signals */
  pid_t (*fork)(void);
  int (*execvpe)(const char *file, char *const *arguments, char *const *environment);
  void (*exit)(int code); /* _exit: no handlers, for the child of a fork */
  int (*at_exit)(void (*call)(void));
  pid_t (*wait4)(pid_t pid, int *status, int options, struct rusage *usage);
  int (*kill)(pid_t pid, int signal);
  int (*sigqueue)(pid_t pid, int signal); /* with no value */
  int (*tgkill)(pid_t process, pid_t thread, int signal);
  pid_t (*gettid)(void);
  pid_t (*getpid)(void);
  pid_t (*getppid)(void);
  long (*sysconf)(int name);
  pid_t (*setsid)(void);
  int (*prctl)(int option, unsigned long argument);
  int (*setaffinity)(pid_t pid, size_t bytes, const void *mask);
  int (*setpriority)(int nice);
  int (*getpriority)(int *nice);
  int (*reset_on_fork)(void); /* a priority of this thread above the usual one is not its children's */
  int (*mask_signals)(int how, const sigset_t *set, sigset_t *old);
  int (*pending_signals)(sigset_t *out);
  int (*sigaction)(int signal, const struct sigaction *action, struct sigaction *old);
  int (*signalfd)(int fd, const sigset_t *set, int flags);
  int (*thread_create)(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument);
  /* descriptors */
  int (*pipe2)(int ends[2], int flags);
  int (*isatty)(int fd);
  int (*tcgetattr)(int fd, struct termios *out);
  int (*tcsetattr)(int fd, int when, const struct termios *settings);
  int (*ioctl)(int fd, unsigned long request, void *argument);
  int (*dup2)(int from, int to);
  int (*fcntl)(int fd, int command, int argument);
  int (*close_range)(unsigned int first, unsigned int last);
  off_t (*lseek)(int fd, off_t offset, int whence);
  int (*access)(const char *path, int mode);
  ssize_t (*readlink)(const char *path, char *buffer, size_t bytes);
  char *(*getcwd)(char *buffer, size_t bytes);
  int (*chdir)(const char *path);
  int (*epoll_create1)(int flags);
  int (*epoll_ctl)(int epoll, int operation, int fd, struct epoll_event *event);
  int (*epoll_wait)(int epoll, struct epoll_event *events, int count, int timeout_ms);
  int (*poll)(struct pollfd *descriptors, nfds_t count, int timeout_ms);
  int (*socket)(int domain, int type, int protocol);
  int (*socketpair)(int domain, int type, int protocol, int ends[2]);
  ssize_t (*sendmsg)(int fd, const struct msghdr *message, int flags);
  ssize_t (*recvmsg)(int fd, struct msghdr *message, int flags);
  int (*bind)(int fd, const struct sockaddr *address, socklen_t bytes);
  int (*listen)(int fd, int backlog);
  int (*setsockopt)(int fd, int level, int option, const void *value, socklen_t bytes);
  int (*connect)(int fd, const struct sockaddr *address, socklen_t bytes);
  int (*getsockname)(int fd, struct sockaddr *address, socklen_t *bytes);
  int (*getpeername)(int fd, struct sockaddr *address, socklen_t *bytes);
  int (*accept4)(int fd, struct sockaddr *address, socklen_t *bytes, int flags);
  int (*getsockopt)(int fd, int level, int option, void *value, socklen_t *bytes);
  int (*getaddrinfo)(const char *name, const char *service, const struct addrinfo *wanted, struct addrinfo **out);
  int (*setns)(int fd); /* of a network namespace */
  ssize_t (*getrandom)(void *buffer, size_t bytes, unsigned int flags);
  int (*nanosleep)(const struct timespec *time);
} even_os_calls;

extern even_os_calls even_os;

/* The table with the real calls; a test copies it back after an injected fault. */
extern const even_os_calls even_os_real;

#endif
