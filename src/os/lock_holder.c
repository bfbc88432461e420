/* Lines of /proc/locks: "1: FLOCK  ADVISORY  WRITE 1234 08:01:131 0 EOF". */
#include "os/lock_holder.h"

#include "base/fail.h"
#include "base/utf8.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/entries.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/process.h"
#include "os/process_stat.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

enum { MOST_LOCKS = 1 << 22, SHOWN = 201, MOST_HOST = 256 };

/* 0: that is not told. */
static pid_t find_in(const char *locks, const struct stat *of) {
  for (const char *line = locks; *line != '\0'; line = strchr(line, '\n') + 1) {
    long pid = 0;
    unsigned int major_number = 0;
    unsigned int minor_number = 0;
    unsigned long long inode = 0;
    int found = sscanf(line, "%*d: FLOCK %*s %*s %ld %x:%x:%llu", &pid, &major_number, &minor_number, &inode);
    if (found == 4 && pid > 0 && inode == of->st_ino && makedev(major_number, minor_number) == of->st_dev) {
      return (pid_t)pid;
    }
    if (strchr(line, '\n') == NULL) {
      break;
    }
  }
  return 0;
}

typedef struct descriptors {
  pid_t pid;
  int folder;
  bool found;
} descriptors;

static bool look_at(void *context, const char *name) {
  descriptors *now = context;
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/fd/%.20s", (long)now->pid, name);
  now->found = even_folder_is_at(path, now->folder);
  return !now->found;
}

/* Who took a lock may have ended, and its number be another process's, while a child has the descriptor, and so the
 * lock. */
static bool has_open(pid_t pid, int folder) {
  descriptors now = {.pid = pid, .folder = folder};
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/fd", (long)pid);
  return even_folder_each(path, look_at, &now) == EVEN_OK && now.found;
}

static pid_t find_holder(const char *folder) {
  struct stat facts;
  even_text locks = EVEN_TEXT_EMPTY;
  pid_t holder = 0;
  int fd = even_os.open(folder, O_PATH | O_CLOEXEC, 0);
  if (fd < 0) {
    return 0;
  }
  if (even_os.fstat(fd, &facts) == 0 && even_file_read("/proc/locks", MOST_LOCKS, &locks) == EVEN_OK) {
    holder = find_in(even_text_string(&locks), &facts);
    holder = holder > 0 && has_open(holder, fd) ? holder : 0;
  }
  (void)even_os.close(fd);
  even_text_free(&locks);
  return holder;
}

static void add_command(pid_t pid, even_text *out) {
  char shown[SHOWN];
  even_text words = EVEN_TEXT_EMPTY;
  if (even_process_add_command(pid, &words) == EVEN_OK && words.length > 0) {
    even_text_format(out, " (%s)", even_utf8_clean(words.data, shown, sizeof shown));
  }
  even_text_free(&words);
}

static void add_beginning(pid_t pid, even_text *out) {
  even_process_stat stat;
  struct tm parts;
  char when[32];
  long ticks = even_os.sysconf(_SC_CLK_TCK);
  if (ticks <= 0 || even_process_stat_read(pid, &stat) != 0) {
    return;
  }
  uint64_t age_ns = even_clock_boot_ns() - (uint64_t)((double)stat.start_time / (double)ticks * 1e9);
  time_t began = (time_t)((even_clock_wall_ns() - age_ns) / 1000000000u);
  if (localtime_r(&began, &parts) != NULL && strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &parts) > 0) {
    even_text_format(out, ", which began at %s", when);
  }
}

void even_lock_add_holder(const char *folder, bool command, even_text *out) {
  char host[MOST_HOST];
  pid_t holder = find_holder(folder);
  if (holder > 0) {
    even_host_name(host, sizeof host);
    even_text_format(out, "host %s: process %ld", host, (long)holder);
    if (command) {
      add_command(holder, out);
    }
    add_beginning(holder, out);
  }
  even_error_clear(); /* what could not be read is not said */
}
