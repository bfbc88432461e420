/* cgroup v1 and v2 (Documentation/admin-guide/cgroup-v1, cgroup-v2.rst, scheduler/sched-bwc.rst of the kernel). */
#include "os/cgroup.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/entries.h"
#include "os/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILE_LIMIT = 4 << 20, REMOVE_MS = 1000 };

static const double period_us = 10000;
static const double smallest_quota_us = 1000;

typedef struct mount {
  int version;
  char point[EVEN_CGROUP_PATH];
  char root[EVEN_CGROUP_PATH]; /* the group that shows at `point` */
} mount;

/* Whether `word` stands in a list separated by `separator`. */
static bool listed(const char *list, size_t length, const char *word, char separator) {
  size_t wanted = strlen(word);
  const char *end = list + length;
  while (list < end) {
    const char *stop = memchr(list, separator, (size_t)(end - list));
    size_t part = (size_t)((stop == NULL ? end : stop) - list);
    if (part == wanted && memcmp(list, word, wanted) == 0) {
      return true;
    }
    list += part + 1;
  }
  return false;
}

static even_status read_proc(const char *root, const char *name, even_text *out) {
  char path[EVEN_CGROUP_PATH];
  (void)snprintf(path, sizeof path, "%s/proc/self/%s", root, name);
  even_text_clear(out);
  return even_file_read(path, FILE_LIMIT, out);
}

/* `36 35 98:0 /group /point options … - cgroup2 source super,options` (proc(5)) */
static bool read_mount(char *line, const char *controller, mount *out) {
  char *tail = strstr(line, " - ");
  char type[32] = "";
  char super[EVEN_CGROUP_PATH] = "";
  if (tail == NULL || sscanf(tail, " - %31s %*s %511s", type, super) != 2 ||
      sscanf(line, "%*s %*s %*s %511s %511s", out->root, out->point) != 2) {
    return false;
  }
  out->version = strcmp(type, "cgroup") == 0 ? 1 : strcmp(type, "cgroup2") == 0 ? 2 : 0;
  return out->version == 2 || (out->version == 1 && listed(super, strlen(super), controller, ','));
}

static bool find_mount(char *text, const char *controller, int version, mount *out) {
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest)) {
    if (read_mount(line, controller, out) && out->version == version) {
      return true;
    }
  }
  return false;
}

/* This process's group in /proc/self/cgroup: `4:memory:/a/b` (v1), `0::/a/b` (v2). */
static bool find_group(char *text, const char *controller, int version, char *group, size_t size) {
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest)) {
    const char *names = strchr(line, ':');
    const char *path = names == NULL ? NULL : strchr(names + 1, ':');
    if (path == NULL) {
      continue;
    }
    size_t length = (size_t)(path - names - 1);
    if (version == 2 ? length == 0 : listed(names + 1, length, controller, ',')) {
      (void)snprintf(group, size, "%s", path + 1);
      return true;
    }
  }
  return false;
}

/* `file`: cgroup.controllers (it may use) or cgroup.subtree_control (its children may). */
static bool has_controller(const even_cgroup *group, const char *file, const char *controller) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", group->folder, file);
  bool found = even_text_status(&path) == EVEN_OK && even_file_read(path.data, FILE_LIMIT, &text) == EVEN_OK;
  if (found) {
    size_t length = text.length > 0 && text.data[text.length - 1] == '\n' ? text.length - 1 : text.length;
    found = listed(text.data, length, controller, ' ');
  }
  even_text_free(&path);
  even_text_free(&text);
  return found;
}

/* False: not there. `text` is scratch. */
static even_status own_of_version(const char *root, const char *controller, int version, even_text *text,
                                  even_cgroup *out, bool *found) {
  mount where;
  char group[EVEN_CGROUP_PATH];
  *found = false;
  EVEN_TRY(read_proc(root, "mountinfo", text));
  if (!find_mount(text->data, controller, version, &where)) {
    return EVEN_OK;
  }
  EVEN_TRY(read_proc(root, "cgroup", text));
  if (!find_group(text->data, controller, version, group, sizeof group)) {
    return EVEN_OK;
  }
  const char *below = group;
  size_t shown = strcmp(where.root, "/") == 0 ? 0 : strlen(where.root);
  if (strncmp(group, where.root, shown) == 0 && (group[shown] == '/' || group[shown] == '\0')) {
    below += shown; /* a container sees its own group at the mount point */
  }
  int written =
      snprintf(out->folder, sizeof out->folder, "%s%s%s", root, where.point, strcmp(below, "/") == 0 ? "" : below);
  out->version = version;
  *found = written > 0 && (size_t)written < sizeof out->folder &&
           (version == 1 || has_controller(out, "cgroup.controllers", controller));
  return EVEN_OK;
}

even_status even_cgroup_own(const char *root, const char *controller, even_cgroup *out) {
  even_text text = EVEN_TEXT_EMPTY;
  bool found = false;
  even_status status = EVEN_OK;
  for (int version = 1; version <= 2 && status == EVEN_OK && !found; version++) {
    status = own_of_version(root, controller, version, &text, out, &found);
  }
  even_text_free(&text);
  if (status == EVEN_OK && !found) {
    status = even_fail(EVEN_ERR_UNSUPPORTED, "no control group with the %s controller is mounted here", controller);
  }
  return status;
}

static even_status put(const char *folder, const char *file, const char *value) {
  char path[EVEN_CGROUP_PATH + 64];
  (void)snprintf(path, sizeof path, "%s/%s", folder, file);
  int fd = even_os.open(path, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "%s cannot be opened", path);
  }
  even_status status = EVEN_OK;
  if (even_os.write(fd, value, strlen(value)) != (ssize_t)strlen(value)) {
    status = even_fail_errno(errno, "%s did not take \"%s\"", path, value);
  }
  (void)even_os.close(fd);
  return status;
}

even_status even_cgroup_make(const even_cgroup *parent, const char *controller, const char *name, even_cgroup *out) {
  char enable[64];
  out->version = parent->version;
  out->switched_on = false;
  int written = snprintf(out->folder, sizeof out->folder, "%s/%s", parent->folder, name);
  if (written < 0 || (size_t)written >= sizeof out->folder) {
    out->folder[0] = '\0'; /* cut off, it would name another group */
    return even_fail(EVEN_ERR_OVERFLOW, "the path of control group %s is too long", name);
  }
  if (parent->version == 2 && !has_controller(parent, "cgroup.subtree_control", controller)) {
    (void)snprintf(enable, sizeof enable, "+%s", controller);
    even_status status = put(parent->folder, "cgroup.subtree_control", enable);
    if (status != EVEN_OK) {
      out->folder[0] = '\0';
      return status;
    }
    out->switched_on = true;
  }
  if (even_os.mkdir(out->folder, 0777) != 0 && errno != EEXIST) {
    even_status status = even_fail_errno(errno, "control group %s cannot be made", out->folder);
    even_cgroup_switch_off(out, controller);
    out->switched_on = false;
    out->folder[0] = '\0';
    return status;
  }
  return EVEN_OK;
}

typedef struct children {
  const char *folder;
  bool any;
} children;

static bool look_for_child(void *context, const char *name) {
  children *at = context;
  char path[2 * EVEN_CGROUP_PATH];
  (void)snprintf(path, sizeof path, "%s/%s/cgroup.procs", at->folder, name);
  at->any = even_os.access(path, F_OK) == 0;
  return !at->any;
}

void even_cgroup_switch_off(const even_cgroup *group, const char *controller) {
  even_cgroup parent = *group;
  char disable[64];
  char *slash = strrchr(parent.folder, '/');
  if (!group->switched_on || slash == NULL) {
    return;
  }
  *slash = '\0';
  const even_error kept = *even_error_last();
  children found = {.folder = parent.folder};
  (void)snprintf(disable, sizeof disable, "-%s", controller);
  bool looked = even_folder_each(parent.folder, look_for_child, &found) == EVEN_OK;
  if (!looked || (!found.any && put(parent.folder, "cgroup.subtree_control", disable) != EVEN_OK)) {
    (void)even_error_restore(&kept); /* it costs nothing where it stays on */
  }
}

even_status even_cgroup_limit_cpu(const even_cgroup *group, double cores) {
  char text[64];
  if (!(cores > 0) || cores > 1e6) {
    return even_fail(EVEN_ERR_ARGUMENT, "a quota of %g cores", cores);
  }
  /* the kernel takes no quota below a millisecond: a smaller share gets a longer period */
  double period = cores * period_us < smallest_quota_us ? smallest_quota_us / cores : period_us;
  period = period > 1e6 ? 1e6 : period;
  long quota = (long)(cores * period + 0.5);
  if (group->version == 2) {
    (void)snprintf(text, sizeof text, "%ld %ld", quota, (long)period);
    return put(group->folder, "cpu.max", text);
  }
  (void)snprintf(text, sizeof text, "%ld", (long)period);
  EVEN_TRY(put(group->folder, "cpu.cfs_period_us", text));
  (void)snprintf(text, sizeof text, "%ld", quota);
  return put(group->folder, "cpu.cfs_quota_us", text);
}

/* The number behind `key` in a file of "key number" lines. */
static even_status read_count(const even_cgroup *group, const char *file, const char *key, uint64_t *value) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", group->folder, file);
  even_status status = even_text_status(&path);
  *value = 0;
  if (status == EVEN_OK) {
    status = even_file_read(path.data, FILE_LIMIT, &text);
  }
  char *rest = NULL;
  for (char *line = status == EVEN_OK ? strtok_r(text.data, "\n", &rest) : NULL; line != NULL;
       line = strtok_r(NULL, "\n", &rest)) {
    size_t length = strlen(key);
    if (strncmp(line, key, length) == 0 && line[length] == ' ') {
      *value = strtoumax(line + length + 1, NULL, 10);
    }
  }
  even_text_free(&path);
  even_text_free(&text);
  return status;
}

uint64_t even_cgroup_oom_kills(const even_cgroup *group) {
  uint64_t value = 0;
  if (read_count(group, group->version == 2 ? "memory.events" : "memory.oom_control", "oom_kill", &value) != EVEN_OK) {
    return 0;
  }
  return value;
}

/* A pidfd of the first member, -1 for none. */
static int open_member(const char *folder) {
  char path[EVEN_CGROUP_PATH + 64];
  char text[64];
  (void)snprintf(path, sizeof path, "%s/cgroup.procs", folder);
  int fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  ssize_t got = fd < 0 ? -1 : even_os.read(fd, text, sizeof text - 1);
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
  text[got > 0 ? got : 0] = '\0';
  long pid = strtol(text, NULL, 10);
  return pid > 0 ? even_os.pidfd_open((pid_t)pid, 0) : -1;
}

/* Waits for the end of one member. False: there is none that has not ended yet. */
static bool wait_for_member(const char *folder, int limit_ms) {
  struct pollfd member = {.fd = open_member(folder), .events = POLLIN};
  if (member.fd < 0) {
    return false;
  }
  bool lives = even_os.poll(&member, 1, 0) == 0;
  if (lives) {
    (void)even_os.poll(&member, 1, limit_ms);
  }
  (void)even_os.close(member.fd);
  return lives;
}

even_status even_cgroup_remove(const char *folder) {
  const struct timespec moment = {0, 5000000};
  uint64_t deadline_ns = even_clock_ns() + REMOVE_MS * UINT64_C(1000000);
  for (;;) {
    if (even_os.rmdir(folder) == 0 || errno == ENOENT) {
      return EVEN_OK;
    }
    int why = errno;
    uint64_t now = even_clock_ns();
    if (why != EBUSY || now >= deadline_ns) {
      return even_fail_errno(why, "control group %s cannot be removed", folder);
    }
    if (!wait_for_member(folder, (int)((deadline_ns - now) / 1000000u) + 1)) {
      (void)even_os.nanosleep(&moment);
    }
  }
}
