/* proc(5): pid (name) state ppid pgrp session … The name may hold anything, blanks and ')' too: read from its end. */
#include "os/process_stat.h"

#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Its own; by that way round because qemu-user makes up a file of the usual name, whose times no other process sees. */
#define OWN "/proc/self/task/../stat"

/* Fields that lie between the name and the number of threads, and the CPU's. */
enum { THREADS_AFTER_NAME = 17, CPU_AFTER_NAME = 36 };

/* A whole number from behind `before` fields; -1 where there are fewer. */
static int field(const char *text, int before) {
  for (; before >= 0; before--) {
    text += strspn(text, " ");
    if (before > 0) {
      text += strcspn(text, " ");
    }
  }
  char *end = NULL;
  long value = strtol(text, &end, 10);
  return end != text && value >= 0 && value < INT_MAX ? (int)value : -1;
}

bool even_process_stat_ended(const even_process_stat *stat) {
  return stat->state == 'Z' || stat->state == 'X';
}

bool even_process_stat_parse(const char *text, even_process_stat *out) {
  unsigned long user = 0;
  unsigned long system = 0;
  long children_user = 0;
  long children_system = 0;
  long pages = 0;
  unsigned long minor_faults = 0;
  unsigned long children_faults = 0;
  unsigned long major_faults = 0;
  long group = 0;
  long session = 0;
  const char *name_end = strrchr(text, ')');
  *out = (even_process_stat){.pid = (pid_t)strtol(text, NULL, 10)};
  if (name_end == NULL || out->pid <= 0 ||
      sscanf(name_end + 1,
             " %c %*d %ld %ld %d %*d %*u %lu %lu %lu %*u %lu %lu %ld %ld %*d %*d %*d %*d %" SCNu64 " %*u %ld",
             &out->state, &group, &session, &out->terminal, &minor_faults, &children_faults, &major_faults, &user,
             &system, &children_user, &children_system, &out->start_time, &pages) != 13) {
    return false;
  }
  out->group = (pid_t)group;
  out->session = (pid_t)session;
  out->minor_faults = (double)minor_faults + (double)children_faults;
  out->major_faults = (double)major_faults;
  out->threads = field(name_end + 1, THREADS_AFTER_NAME);
  out->cpu = field(name_end + 1, CPU_AFTER_NAME);
  out->cpu_seconds = ((double)user + (double)system + (double)children_user + (double)children_system) /
                     (double)even_os.sysconf(_SC_CLK_TCK);
  out->rss_bytes = (double)pages * (double)even_os.sysconf(_SC_PAGESIZE);
  return true;
}

int even_process_stat_read(pid_t pid, even_process_stat *out) {
  char path[64];
  char text[2048]; /* 52 numbers and a name of 64 bytes at most: more than the kernel ever writes */
  size_t filled = 0;
  ssize_t got = 0;
  (void)snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
  int fd = even_os.open(pid == 0 ? OWN : path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    return errno;
  }
  while (filled < sizeof text - 1 &&
         ((got = even_os.read(fd, text + filled, sizeof text - 1 - filled)) > 0 || (got < 0 && errno == EINTR))) {
    filled += got > 0 ? (size_t)got : 0;
  }
  int failed = got < 0 ? errno : 0;
  (void)even_os.close(fd);
  text[filled] = '\0';
  return failed != 0 ? failed : even_process_stat_parse(text, out) ? 0 : EINVAL;
}

bool even_process_is_typed(void) {
  even_process_stat own = {0};
  return even_process_stat_read(0, &own) == 0 && own.terminal != 0 && own.group != own.session;
}
