/* CPU quota and memory limit from cgroup v1 and v2, nested groups included. */
#include "device/limits.h"

#include "base/fail.h"
#include "os/file.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_LIMIT = 1 << 20 };

/* v1 says "no limit" with the largest multiple of the page size; nothing real comes near it. */
static const uint64_t V1_UNLIMITED = UINT64_C(1) << 62;

/* One mounted hierarchy: a line of /proc/self/mountinfo. */
typedef struct mount {
  bool unified;      /* cgroup v2 */
  const char *root;  /* the group that shows at `point` */
  const char *point; /* where it is mounted */
  const char *super; /* options of the superblock: v1 lists its controllers there */
} mount;

/* Whether `word` stands in the comma-separated `list`. */
static bool listed(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; *at != '\0';) {
    size_t span = strcspn(at, ",");
    if (span == length && strncmp(at, word, length) == 0) {
      return true;
    }
    at += span + (at[span] == ',' ? 1 : 0);
  }
  return false;
}

/* Reads a small file into buffer; false where it is absent or empty. Errors are left to the caller's `status`. */
static bool small_file(const char *folder, const char *name, char *buffer, size_t size, even_status *status) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", folder, name);
  even_status read = even_text_status(&path);
  if (read == EVEN_OK) {
    read = even_file_read(even_text_string(&path), FILE_LIMIT, &content);
  }
  if (read == EVEN_ERR_MEMORY) {
    *status = read;
  }
  (void)snprintf(buffer, size, "%s", even_text_string(&content));
  even_text_free(&path);
  even_text_free(&content);
  return read == EVEN_OK && buffer[0] != '\0';
}

static void cpu_tighten(even_limits *limits, double quota_us, double period_us, const char *folder) {
  if (quota_us > 0 && period_us > 0 && quota_us / period_us < limits->cpu_cores) {
    limits->cpu_cores = quota_us / period_us;
    (void)snprintf(limits->cpu_folder, sizeof limits->cpu_folder, "%s", folder);
  }
}

static void memory_tighten(even_limits *limits, const char *text, const char *folder) {
  char *end = NULL;
  uintmax_t bytes = strtoumax(text, &end, 10); /* "max" leaves end at text */
  if (end != text && bytes > 0 && bytes < V1_UNLIMITED && bytes < limits->memory_bytes) {
    limits->memory_bytes = bytes;
    (void)snprintf(limits->memory_folder, sizeof limits->memory_folder, "%s", folder);
  }
}

static even_status folder_read(const char *folder, bool unified, even_limits *limits) {
  char first[128];
  char second[128];
  even_status status = EVEN_OK;
  if (unified) {
    double quota = 0;
    double period = 0;
    if (small_file(folder, "cpu.max", first, sizeof first, &status) && sscanf(first, "%lf %lf", &quota, &period) == 2) {
      cpu_tighten(limits, quota, period, folder);
    }
    if (small_file(folder, "memory.max", first, sizeof first, &status)) {
      memory_tighten(limits, first, folder);
    }
    return status;
  }
  if (small_file(folder, "cpu.cfs_quota_us", first, sizeof first, &status) &&
      small_file(folder, "cpu.cfs_period_us", second, sizeof second, &status)) {
    cpu_tighten(limits, strtod(first, NULL), strtod(second, NULL), folder);
  }
  if (small_file(folder, "memory.limit_in_bytes", first, sizeof first, &status)) {
    memory_tighten(limits, first, folder);
  }
  return status;
}

/* Reads the group `path` of a hierarchy and all groups above it up to the mount point. */
static even_status group_read(const even_device_source *source, const mount *at, const char *path,
                              even_limits *limits) {
  even_text folder = EVEN_TEXT_EMPTY;
  size_t root_length = strcmp(at->root, "/") == 0 ? 0 : strlen(at->root);
  /* a container may see its own group mounted at the top, while its path is the host's */
  const char *below = strncmp(path, at->root, root_length) == 0 ? path + root_length : "";
  if (below[0] != '/') {
    below = "";
  }
  even_text_format(&folder, "%s%s", source->root, at->point);
  size_t top = folder.length;
  if (strstr(below, "..") == NULL) {
    even_text_add(&folder, below);
  }
  even_status status = even_text_status(&folder);
  while (status == EVEN_OK) {
    while (folder.length > top && folder.data[folder.length - 1] == '/') {
      folder.data[--folder.length] = '\0';
    }
    status = folder_read(folder.data, at->unified, limits);
    if (folder.length <= top) {
      break;
    }
    while (folder.length > top && folder.data[folder.length - 1] != '/') {
      folder.data[--folder.length] = '\0';
    }
  }
  even_text_free(&folder);
  return status;
}

/* Cuts one line of mountinfo (proc(5): ID parent major:minor ROOT POINT options [fields] - TYPE source SUPER). */
static bool mount_parse(char *line, mount *out) {
  char *save = NULL;
  char *tail = strstr(line, " - ");
  if (tail == NULL) {
    return false;
  }
  *tail = '\0';
  char *type = strtok_r(tail + 3, " ", &save);
  char *device = type == NULL ? NULL : strtok_r(NULL, " ", &save);
  char *super = device == NULL ? NULL : strtok_r(NULL, " ", &save);
  if (super == NULL || (strcmp(type, "cgroup") != 0 && strcmp(type, "cgroup2") != 0)) {
    return false;
  }
  char *field = strtok_r(line, " ", &save);
  for (int skipped = 0; skipped < 3 && field != NULL; skipped++) {
    field = strtok_r(NULL, " ", &save);
  }
  char *point = field == NULL ? NULL : strtok_r(NULL, " ", &save);
  if (point == NULL) {
    return false;
  }
  *out = (mount){.unified = strcmp(type, "cgroup2") == 0, .root = field, .point = point, .super = super};
  return true;
}

/* The path of this process's group in a hierarchy, from /proc/self/cgroup ("4:cpu,cpuacct:/a/b"); false: none. */
static bool path_find(const char *groups, const mount *at, const char *controller, char *path, size_t size) {
  char line[1024];
  for (const char *next = groups; *next != '\0';) {
    size_t span = strcspn(next, "\n");
    (void)snprintf(line, sizeof line, "%.*s", (int)(span < sizeof line ? span : sizeof line - 1), next);
    next += span + (next[span] == '\n' ? 1 : 0);
    char *controllers = strchr(line, ':');
    char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
    if (group == NULL) {
      continue;
    }
    *group++ = '\0';
    controllers++;
    if (at->unified ? controllers[0] == '\0' : listed(controllers, controller)) {
      (void)snprintf(path, size, "%s", group);
      return true;
    }
  }
  return false;
}

static even_status mount_read(const even_device_source *source, const mount *at, const char *groups,
                              even_limits *limits) {
  static const char *const controllers[] = {"cpu", "memory"};
  char path[1024];
  if (at->unified) {
    return path_find(groups, at, "", path, sizeof path) ? group_read(source, at, path, limits) : EVEN_OK;
  }
  for (size_t i = 0; i < sizeof controllers / sizeof controllers[0]; i++) {
    if (listed(at->super, controllers[i]) && path_find(groups, at, controllers[i], path, sizeof path)) {
      EVEN_TRY(group_read(source, at, path, limits));
    }
  }
  return EVEN_OK;
}

static even_status proc_read(const even_device_source *source, const char *name, even_text *out) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/proc/self/%s", source->root, name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_file_read(even_text_string(&path), FILE_LIMIT, out);
  }
  even_text_free(&path);
  return status;
}

even_status even_limits_read(const even_device_source *source, even_limits *out) {
  even_text groups = EVEN_TEXT_EMPTY;
  even_text mounts = EVEN_TEXT_EMPTY;
  *out = (even_limits){.cpu_cores = INFINITY, .memory_bytes = UINT64_MAX};
  even_status status = proc_read(source, "cgroup", &groups);
  if (status == EVEN_OK) {
    status = proc_read(source, "mountinfo", &mounts);
  }
  if (status == EVEN_OK) {
    char *save = NULL;
    mount at;
    for (char *line = strtok_r(mounts.data, "\n", &save); line != NULL && status == EVEN_OK;
         line = strtok_r(NULL, "\n", &save)) {
      if (mount_parse(line, &at)) {
        status = mount_read(source, &at, even_text_string(&groups), out);
      }
    }
  } else if (status != EVEN_ERR_MEMORY) {
    status = EVEN_OK; /* no control groups here */
  }
  even_text_free(&groups);
  even_text_free(&mounts);
  return status;
}
