/* proc(5) and the kernel's sched-stats.rst: a thread's schedstat is its time on a CPU, its time waiting for one (both
 * in ns), and how often it got one. */
#include "device/pressure.h"

#include "base/text.h"
#include "os/entries.h"
#include "os/file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_LIMIT_BYTES = 65536 };

double even_pressure_parse_wait(const char *schedstat) {
  char *end = NULL;
  (void)strtod(schedstat, &end);
  const char *second = end;
  double wait_ns = strtod(second, &end);
  return end != second ? wait_ns / 1e9 : NAN;
}

double even_pressure_parse_swap(const char *status) {
  static const char key[] = "\nVmSwap:";
  const char *at = strstr(status, key);
  return at != NULL ? strtod(at + sizeof key - 1, NULL) * 1024.0 : NAN;
}

/* Empty where it cannot be read. */
static const char *contents(const char *path, even_text *content) {
  even_text_clear(content);
  return even_file_read(path, FILE_LIMIT_BYTES, content) == EVEN_OK ? even_text_string(content) : "";
}

static double frequency(const char *folder, int cpu, const char *file, even_text *content) {
  char path[512];
  (void)snprintf(path, sizeof path, "%s/cpu%d/cpufreq/%s", folder, cpu, file);
  return strtod(contents(path, content), NULL);
}

double even_pressure_clock(const char *folder, int cpu) {
  even_text content = EVEN_TEXT_EMPTY;
  double highest = cpu >= 0 ? frequency(folder, cpu, "cpuinfo_max_freq", &content) : 0.0;
  double now = highest > 0.0 ? frequency(folder, cpu, "scaling_cur_freq", &content) : 0.0;
  even_text_free(&content);
  return now > 0.0 ? now / highest : NAN;
}

typedef struct threads {
  pid_t pid;
  double wait_seconds;
  even_text content;
} threads;

static bool add_thread(void *context, const char *thread) {
  threads *all = context;
  char path[96];
  (void)snprintf(path, sizeof path, "/proc/%ld/task/%.20s/schedstat", (long)all->pid, thread);
  double seconds = even_pressure_parse_wait(contents(path, &all->content));
  all->wait_seconds += isfinite(seconds) ? seconds : 0.0; /* the thread may just have ended */
  return true;
}

/* The kernel may have been built without, which the process itself shows. */
static double wait_of(pid_t pid) {
  threads all = {.pid = pid, .content = EVEN_TEXT_EMPTY};
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/schedstat", (long)pid);
  bool known = isfinite(even_pressure_parse_wait(contents(path, &all.content)));
  (void)snprintf(path, sizeof path, "/proc/%ld/task", (long)pid);
  known = known && even_folder_each(path, add_thread, &all) == EVEN_OK;
  even_text_free(&all.content);
  return known ? all.wait_seconds : NAN;
}

void even_pressure_look(pid_t pid, const even_process_stat *stat, even_pressure *out) {
  even_text content = EVEN_TEXT_EMPTY;
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/status", (long)pid);
  *out = (even_pressure){.wait_seconds = wait_of(pid),
                         .major_faults = stat->major_faults,
                         .swap_bytes = even_pressure_parse_swap(contents(path, &content)),
                         .clock = even_pressure_clock("/sys/devices/system/cpu", stat->cpu)};
  even_text_free(&content);
}
