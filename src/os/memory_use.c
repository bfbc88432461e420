/* /proc/self/status (proc(5)), /proc/meminfo, the memory controller of control groups, version 1 and 2, and what
 * glibc's allocator keeps (mallopt(3), mallinfo(3)). */
#include "os/memory_use.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/path.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>

enum { FILE_LIMIT = 1 << 20, MOST_LEVELS = 64 };

/* v1 says "no limit" with the largest multiple of the page size; nothing real comes near it. */
static const uint64_t v1_unlimited = UINT64_C(1) << 62;

/* What the files of one version are called. */
typedef struct names {
  const char *limit;
  const char *high; /* above it a group is slowed down, and nobody killed; NULL: there is none */
  const char *usage;
  const char *idle_files; /* lines of memory.stat */
  const char *active_files;
} names;

static const names of_version[] = {
    {"memory.limit_in_bytes", NULL, "memory.usage_in_bytes", "total_inactive_file", "total_active_file"},
    {"memory.max", "memory.high", "memory.current", "inactive_file", "active_file"},
};

/* Under version 2 limits hold also below groups that do not have the controller themselves (evenstep run --cpu-quota
 * makes such): any other controller finds the group then. Without control groups, or /proc, the host's memory counts.
 */
static even_status find_group(const char *root, even_cgroup *out) {
  static const char *const controllers[] = {"memory", "cpu", "pids"};
  for (size_t i = 0; i < sizeof controllers / sizeof controllers[0]; i++) {
    even_status status = even_cgroup_own(root, controllers[i], out);
    if (status == EVEN_ERR_MEMORY || (status == EVEN_OK && (i == 0 || out->version == 2))) {
      return status;
    }
  }
  *out = (even_cgroup){0};
  return EVEN_OK;
}

even_status even_memory_place_find(const char *root, even_memory_place *out) {
  memset(out, 0, sizeof *out);
  int written = snprintf(out->root, sizeof out->root, "%s", root);
  if (written < 0 || (size_t)written >= sizeof out->root) {
    return even_fail(EVEN_ERR_OVERFLOW, "the path %.80s… is too long", root);
  }
  return find_group(root, &out->group);
}

/* The number behind `name` at a line's begin; false where it is not there. */
static bool number_of(const char *content, const char *name, uint64_t *out) {
  size_t length = strlen(name);
  for (const char *line = content; *line != '\0';) {
    if (strncmp(line, name, length) == 0 && (line[length] == ':' || line[length] == ' ')) {
      char *end = NULL;
      *out = strtoumax(line + length + 1, &end, 10);
      return end != line + length + 1;
    }
    line += strcspn(line, "\n");
    line += *line == '\n' ? 1 : 0;
  }
  return false;
}

static even_status read_file(const char *folder, const char *name, even_text *out) {
  char path[EVEN_CGROUP_PATH + 64];
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  even_text_clear(out);
  return even_file_read(path, FILE_LIMIT, out);
}

static even_status process_read(const even_memory_place *place, even_text *text, even_memory_use *out) {
  uint64_t resident = 0;
  uint64_t peak = 0;
  EVEN_TRY(read_file(place->root, "proc/self/status", text));
  if (!number_of(even_text_string(text), "VmRSS", &resident) || !number_of(even_text_string(text), "VmHWM", &peak)) {
    return even_fail(EVEN_ERR_INPUT, "%s/proc/self/status does not say what memory the process has", place->root);
  }
  out->resident_bytes = resident * 1024;
  out->peak_bytes = (peak > resident ? peak : resident) * 1024;
  return EVEN_OK;
}

static even_status host_read(const even_memory_place *place, even_text *text, even_memory_use *out) {
  uint64_t total = 0;
  uint64_t available = 0;
  EVEN_TRY(read_file(place->root, "proc/meminfo", text));
  if (!number_of(even_text_string(text), "MemTotal", &total) ||
      !number_of(even_text_string(text), "MemAvailable", &available)) {
    return even_fail(EVEN_ERR_INPUT, "%s/proc/meminfo does not say how much memory there is", place->root);
  }
  out->limit_bytes = total * 1024;
  out->available_bytes = available * 1024;
  out->free_part = total == 0 ? 0 : (double)available / (double)total;
  return EVEN_OK;
}

/* A file of one number; `found`: it is there and says one ("max" is none). */
static even_status number_read(const char *folder, const char *name, even_text *text, uint64_t *out, bool *found) {
  even_status status = read_file(folder, name, text);
  char *end = NULL;
  *found = false;
  if (status == EVEN_OK) {
    const char *content = even_text_string(text);
    *out = strtoumax(content, &end, 10);
    *found = end != content;
  }
  return status == EVEN_ERR_MEMORY ? status : EVEN_OK;
}

/* v1_unlimited: there is none. */
static even_status limit_read(const char *folder, const char *name, even_text *text, uint64_t *out) {
  uint64_t said = 0;
  bool found = false;
  if (name != NULL) {
    EVEN_TRY(number_read(folder, name, text, &said, &found));
  }
  *out = found ? said : v1_unlimited;
  return EVEN_OK;
}

static uint64_t files_of(const even_text *stat, const char *name) {
  uint64_t bytes = 0;
  return number_of(even_text_string(stat), name, &bytes) ? bytes : 0;
}

static uint64_t less(uint64_t from, uint64_t taken) {
  return from > taken ? from - taken : 0;
}

static even_status group_read(const char *folder, const names *named, even_text *text, even_memory_use *out) {
  uint64_t limit = 0;
  uint64_t high = 0;
  uint64_t usage = 0;
  uint64_t idle = 0;
  uint64_t active = 0;
  bool found = false;
  EVEN_TRY(limit_read(folder, named->limit, text, &limit));
  EVEN_TRY(limit_read(folder, named->high, text, &high));
  high = high < limit ? high : limit;
  if (high >= v1_unlimited) {
    return EVEN_OK;
  }
  EVEN_TRY(number_read(folder, named->usage, text, &usage, &found));
  if (!found) {
    return EVEN_OK;
  }
  even_status status = read_file(folder, "memory.stat", text);
  if (status == EVEN_ERR_MEMORY) {
    return status;
  }
  if (status == EVEN_OK) {
    idle = files_of(text, named->idle_files);
    active = files_of(text, named->active_files);
  }
  usage = less(usage, idle);
  uint64_t available = less(limit, usage);
  double part = high == 0 ? 0 : (double)less(high, less(usage, active)) / (double)high;
  out->free_part = part < out->free_part ? part : out->free_part;
  if (limit < v1_unlimited && available < out->available_bytes) {
    out->available_bytes = available;
    out->limit_bytes = limit;
    (void)snprintf(out->limited_by, sizeof out->limited_by, "%s", folder);
  }
  return EVEN_OK;
}

/* The group and all above it, up to where the hierarchy is mounted: above that there are no such files. */
static even_status groups_read(const even_memory_place *place, even_text *text, even_memory_use *out) {
  char folder[EVEN_CGROUP_PATH];
  const names *named = &of_version[place->group.version == 2];
  (void)snprintf(folder, sizeof folder, "%s", place->group.folder);
  for (int level = 0; level < MOST_LEVELS && folder[0] != '\0'; level++) {
    EVEN_TRY(group_read(folder, named, text, out));
    char *last = strrchr(folder, '/');
    folder[last != NULL ? last - folder : 0] = '\0';
  }
  return EVEN_OK;
}

even_status even_memory_use_read(const even_memory_place *place, even_memory_use *out) {
  even_text text = EVEN_TEXT_EMPTY;
  *out = (even_memory_use){0};
  even_status status = process_read(place, &text, out);
  if (status == EVEN_OK) {
    status = host_read(place, &text, out);
  }
  if (status == EVEN_OK) {
    status = groups_read(place, &text, out);
  }
  even_text_free(&text);
  return status;
}

even_status even_memory_ask(const even_memory_place *place, uint64_t bytes, const char *what) {
  even_memory_place found;
  even_memory_use use;
  if (place == NULL) {
    EVEN_TRY(even_memory_place_find("", &found));
    place = &found;
  }
  EVEN_TRY(even_memory_use_read(place, &use));
  if (bytes <= use.available_bytes - use.available_bytes / 8) {
    return EVEN_OK;
  }
  char host[256];
  even_host_name(host, sizeof host);
  return even_fail(EVEN_ERR_MEMORY,
                   "%s needs %" PRIu64 " bytes of memory, and %" PRIu64
                   " are free on host %s, of which an eighth is left to others",
                   what, bytes, use.available_bytes, host);
}

bool even_memory_peak_reset(const even_memory_place *place) {
  char path[EVEN_CGROUP_PATH + 64];
  (void)snprintf(path, sizeof path, "%s/proc/self/clear_refs", place->root);
  int fd = even_os.open(path, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    return false;
  }
  bool done = even_os.write(fd, "5", 1) == 1;
  (void)even_os.close(fd);
  return done;
}

void even_memory_give_back(void) {
#ifdef __GLIBC__
  (void)malloc_trim(0);
#endif
}

#ifdef __GLIBC__
/* What glibc's thresholds grow to by themselves where large blocks are freed: 32 MiB, and twice that (mallopt(3)). An
 * older one takes none above. */
enum { OWN_MAP = 32 << 20, OWN_TRIM = 64 << 20 };

/* Others put their functions before glibc's (LD_PRELOAD, or linked into the program), some a mallopt that says yes. */
static bool allocator_is_of_glibc(void) {
  void *allocates = dlsym(RTLD_DEFAULT, "malloc");
  void *of_glibc = dlsym(RTLD_DEFAULT, "gnu_get_libc_version");
  Dl_info one = {0};
  Dl_info other = {0};
  return allocates != NULL && of_glibc != NULL && dladdr(allocates, &one) != 0 && dladdr(of_glibc, &other) != 0 &&
         one.dli_fbase == other.dli_fbase;
}

bool even_memory_keep(bool keep) {
  if (!allocator_is_of_glibc()) {
    return false;
  }
  if (mallopt(M_MMAP_THRESHOLD, keep ? INT_MAX : OWN_MAP) == 0 && mallopt(M_MMAP_THRESHOLD, OWN_MAP) == 0) {
    return false;
  }
  return mallopt(M_TRIM_THRESHOLD, keep ? -1 : OWN_TRIM) != 0; /* -1: never */
}

/* struct mallinfo2: older headers lack it. */
typedef struct heap_facts {
  size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
} heap_facts;

uint64_t even_memory_kept_bytes(void) {
  heap_facts (*facts)(void) = NULL;
  void *found = allocator_is_of_glibc() ? dlsym(RTLD_DEFAULT, "mallinfo2") : NULL;
  if (found == NULL) {
    return 0;
  }
  memcpy(&facts, &found, sizeof facts);
  return facts().fordblks;
}
#else
bool even_memory_keep(bool keep) {
  (void)keep;
  return false;
}

uint64_t even_memory_kept_bytes(void) {
  return 0;
}
#endif
