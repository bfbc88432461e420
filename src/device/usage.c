/* /proc and the cgroup's files, read through src/os. */
#include "device/usage.h"

#include "device/workers.h"
#include "os/file.h"
#include "os/process_stat.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_LIMIT_BYTES = 65536 };
static const uint64_t PRIVATE_AGE_NS = UINT64_C(30000000000);

static bool number_after(const char *content, const char *key, double *out) {
  const char *at = strstr(content, key);
  if (at == NULL) {
    return false;
  }
  char *end = NULL;
  *out = strtod(at + strlen(key), &end);
  return end != at + strlen(key);
}

double even_usage_parse_throttled(const char *cpu_stat) {
  double value = 0;
  if (number_after(cpu_stat, "throttled_usec ", &value)) {
    return value / 1e6;
  }
  return number_after(cpu_stat, "throttled_time ", &value) ? value / 1e9 : NAN;
}

/* The folder of the hierarchy whose controllers field holds `controller` ("" is v2's); the line is ID:CONTROLLERS:PATH.
 */
static bool cgroup_folder(const char *cgroup, const char *controller, char *out, size_t bytes) {
  for (const char *line = cgroup; line != NULL && *line != '\0';) {
    const char *first = strchr(line, ':');
    const char *second = first == NULL ? NULL : strchr(first + 1, ':');
    const char *end = strchr(line, '\n');
    if (second == NULL) {
      return false;
    }
    bool found = controller[0] == '\0' && second == first + 1;
    for (const char *at = first + 1; controller[0] != '\0' && at < second;) {
      size_t length = strcspn(at, ",:");
      found = found || (length == strlen(controller) && strncmp(at, controller, length) == 0);
      at += length + 1;
    }
    if (found) {
      size_t length = end == NULL ? strlen(second + 1) : (size_t)(end - second - 1);
      (void)snprintf(out, bytes, "%.*s", (int)length, second + 1);
      return true;
    }
    line = end == NULL ? NULL : end + 1;
  }
  return false;
}

bool even_usage_cgroup_path(const char *cgroup, int which, char *out, size_t bytes) {
  static const struct {
    const char *controller;
    const char *mount;
  } places[] = {{"cpu", "/sys/fs/cgroup/cpu"},
                {"cpu", "/sys/fs/cgroup/cpu,cpuacct"},
                {"", "/sys/fs/cgroup"},
                {"", "/sys/fs/cgroup/unified"}};
  char folder[512];
  if (which < 0 || which >= (int)(sizeof places / sizeof places[0])) {
    return false;
  }
  if (!cgroup_folder(cgroup, places[which].controller, folder, sizeof folder)) {
    out[0] = '\0';
    return true;
  }
  (void)snprintf(out, bytes, "%s%s%scpu.stat", places[which].mount, folder,
                 folder[0] != '\0' && folder[strlen(folder) - 1] == '/' ? "" : "/");
  return true;
}

static double throttled_of(pid_t pid, even_text *content) {
  char path[640];
  char candidate[640];
  double seconds = NAN;
  even_text cgroup = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "/proc/%ld/cgroup", (long)pid);
  if (even_file_read(path, FILE_LIMIT_BYTES, &cgroup) == EVEN_OK) {
    for (int which = 0;
         isnan(seconds) && even_usage_cgroup_path(even_text_string(&cgroup), which, candidate, sizeof candidate);
         which++) {
      even_text_clear(content);
      if (candidate[0] != '\0' && even_file_read(candidate, FILE_LIMIT_BYTES, content) == EVEN_OK) {
        seconds = even_usage_parse_throttled(even_text_string(content));
      }
    }
  }
  even_text_free(&cgroup);
  return seconds;
}

/* Adds the living processes below. One that ends between two looks is for a moment in neither its own nor its parent's
 * time: what was used does not become less. */
static void add_workers(pid_t pid, const even_rank_usage *before, even_rank_usage *out) {
  even_workers now;
  even_workers_look(pid, 0, &now);
  double changed = fabs(now.rss_bytes - before->workers_rss);
  if (now.count > 0 && (before->workers_at_ns == 0 || now.count != before->workers ||
                        changed > before->workers_rss / 8 || out->at_ns - before->workers_at_ns > PRIVATE_AGE_NS)) {
    even_workers_look(pid, 1, &now);
    out->workers_bytes = now.private_bytes;
    out->workers_rss = now.rss_bytes;
    out->workers_at_ns = out->at_ns;
  } else if (now.count > 0) {
    out->workers_bytes = before->workers_bytes;
    out->workers_rss = before->workers_rss;
    out->workers_at_ns = before->workers_at_ns;
  }
  out->workers = now.count;
  out->cpu_seconds += now.cpu_seconds;
  out->rss_bytes += out->workers_bytes;
  if (before->at_ns != 0 && out->cpu_seconds < before->cpu_seconds) {
    out->cpu_seconds = before->cpu_seconds;
  }
}

bool even_usage_look(pid_t pid, uint64_t now_ns, const even_rank_usage *before, even_rank_usage *out) {
  even_text content = EVEN_TEXT_EMPTY;
  even_process_stat stat;
  *out = (even_rank_usage){.at_ns = now_ns, .throttled_seconds = NAN};
  /* an ended process that nobody has waited for has no memory any more */
  bool there = even_process_stat_read(pid, &stat) == 0 && stat.rss_bytes > 0;
  if (there) {
    out->cpu_seconds = stat.cpu_seconds;
    out->rss_bytes = stat.rss_bytes;
    out->throttled_seconds = throttled_of(pid, &content);
    add_workers(pid, before, out);
    even_pressure_look(pid, &stat, &out->pressure);
    if (before->at_ns != 0 && out->pressure.wait_seconds < before->pressure.wait_seconds) { /* a thread has ended */
      out->pressure.wait_seconds = before->pressure.wait_seconds;
    }
  }
  even_text_free(&content);
  even_error_clear(); /* a process that ends in between is no error */
  return there;
}
