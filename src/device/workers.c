/* Walks the tree below a process, breadth first. */
#include "device/workers.h"

#include "base/text.h"
#include "os/entries.h"
#include "os/file.h"
#include "os/process_stat.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORKERS = 1024, FILE_LIMIT_BYTES = 65536 };

typedef struct tree {
  pid_t pids[MOST_WORKERS]; /* the root first */
  size_t count;
  pid_t parent; /* whose threads are read now */
  even_text content;
} tree;

static bool take_children(void *context, const char *thread) {
  tree *now = context;
  char path[96];
  (void)snprintf(path, sizeof path, "/proc/%ld/task/%.20s/children", (long)now->parent, thread);
  even_text_clear(&now->content);
  if (even_file_read(path, FILE_LIMIT_BYTES, &now->content) != EVEN_OK) {
    return true; /* the thread has just ended */
  }
  const char *at = even_text_string(&now->content);
  for (;;) {
    char *end = NULL;
    long pid = strtol(at, &end, 10);
    if (end == at || pid <= 0 || now->count == MOST_WORKERS) {
      return now->count < MOST_WORKERS;
    }
    now->pids[now->count++] = (pid_t)pid;
    at = end;
  }
}

static void add_usage(pid_t pid, even_workers *out) {
  even_process_stat one;
  if (even_process_stat_read(pid, &one) == 0) {
    out->count++;
    out->cpu_seconds += one.cpu_seconds;
    out->rss_bytes += one.rss_bytes;
  }
}

static void add_private(tree *now, pid_t pid, even_workers *out) {
  static const char *const keys[] = {"\nPrivate_Clean:", "\nPrivate_Dirty:"};
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/smaps_rollup", (long)pid);
  even_text_clear(&now->content);
  if (even_file_read(path, FILE_LIMIT_BYTES, &now->content) != EVEN_OK) {
    return; /* it has ended, or is another user's now */
  }
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    const char *at = strstr(even_text_string(&now->content), keys[i]);
    out->private_bytes += at == NULL ? 0 : strtod(at + strlen(keys[i]), NULL) * 1024;
  }
}

void even_workers_look(pid_t pid, int with_private, even_workers *out) {
  tree now = {.pids = {pid}, .count = 1, .content = EVEN_TEXT_EMPTY};
  *out = (even_workers){.private_bytes = with_private ? 0 : (double)NAN};
  for (size_t i = 0; i < now.count; i++) {
    char path[64];
    now.parent = now.pids[i];
    (void)snprintf(path, sizeof path, "/proc/%ld/task", (long)now.parent);
    (void)!even_folder_each(path, take_children, &now); /* fails where it ended meanwhile */
  }
  for (size_t i = 1; i < now.count; i++) {
    add_usage(now.pids[i], out);
    if (with_private) {
      add_private(&now, now.pids[i], out);
    }
  }
  even_text_free(&now.content);
  even_error_clear();
}
