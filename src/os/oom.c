/* /dev/kmsg, and the count in the memory control group. */
#include "os/oom.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pid_t even_oom_victim_of(const char *line) {
  static const char words[] = "Killed process "; /* mm/oom_kill.c, __oom_kill_process: since Linux 2.6 */
  const char *at = strstr(line, words);
  if (at == NULL || (strstr(line, "ut of memory") == NULL && strstr(line, "oom") == NULL)) {
    return 0;
  }
  return (pid_t)strtol(at + sizeof words - 1, NULL, 10);
}

void even_oom_watch_open(even_oom_watch *out) {
  memset(out, 0, sizeof *out);
  out->kernel_log = even_os.open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC, 0);
  if (out->kernel_log >= 0 && even_os.lseek(out->kernel_log, 0, SEEK_END) < 0) {
    (void)even_os.close(out->kernel_log);
    out->kernel_log = -1;
  }
  out->grouped = even_cgroup_own("", "memory", &out->group) == EVEN_OK;
  if (out->grouped) {
    out->kills_before = even_cgroup_oom_kills(&out->group);
  }
  even_error_clear(); /* where it cannot be known, a death by SIGKILL is called just that */
}

void even_oom_watch_read(even_oom_watch *watch) {
  char record[8192];
  while (watch->kernel_log >= 0) {
    ssize_t got = even_os.read(watch->kernel_log, record, sizeof record - 1);
    if (got < 0 && (errno == EPIPE || errno == EINTR)) { /* EPIPE: some were overwritten, the next is there */
      continue;
    }
    if (got <= 0) {
      break;
    }
    record[got] = '\0';
    pid_t victim = even_oom_victim_of(record);
    if (victim > 0 && watch->victim_count < EVEN_OOM_MOST) {
      watch->victims[watch->victim_count++] = victim;
    }
  }
  watch->counted = watch->grouped && even_cgroup_oom_kills(&watch->group) > watch->kills_before;
}

bool even_oom_is_victim(const even_oom_watch *watch, pid_t pid) {
  for (size_t i = 0; i < watch->victim_count; i++) {
    if (watch->victims[i] == pid) {
      return true;
    }
  }
  return false;
}

void even_oom_watch_close(even_oom_watch *watch) {
  if (watch->kernel_log >= 0) {
    (void)even_os.close(watch->kernel_log);
    watch->kernel_log = -1;
  }
}
