/* The model of a disk: files and folders as they are, as they are safe, and what may have happened in between. */
#include "checkpoint/disk_model.h"

#include "os/calls.h"
#include "support/clones.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST_NODES = 512, MOST_ENTRIES = 64, MOST_CHANGES = 256, MOST_DESCRIPTORS = 1024, MOST_NAME = 64 };

typedef struct bytes {
  char *data;
  size_t length;
} bytes;

typedef struct entry {
  char name[MOST_NAME];
  int node;
} entry;

typedef struct folder {
  entry entries[MOST_ENTRIES];
  size_t count;
} folder;

typedef enum change_kind { ADD, REMOVE, MOVE, SWAP } change_kind;

typedef struct change {
  change_kind kind;
  char name[MOST_NAME];
  char other[MOST_NAME];
  int node;
} change;

typedef struct node {
  bool is_folder;
  bytes now;  /* a file */
  bytes safe; /* as of its last fsync */
  folder entries;
  folder safe_entries;
  change changes[MOST_CHANGES]; /* since the folder's last fsync */
  size_t change_count;
} node;

static node nodes[MOST_NODES];
static int node_count;
static char root[256];
static int of_descriptor[MOST_DESCRIPTORS]; /* node + 1 */
static off_t offsets[MOST_DESCRIPTORS];
static long calls;
static disk_kind kind_of_disk;
/* One call at a time: a save syncs by several threads. What looks at a disk after a cut is outside the model. */
static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local bool outside;
void (*disk_model_before)(long call);

static int new_node(bool is_folder) {
  assert_true(node_count < MOST_NODES);
  nodes[node_count] = (node){.is_folder = is_folder};
  return node_count++;
}

static void set_bytes(bytes *out, const char *data, size_t length) {
  out->data = realloc(out->data, length + 1);
  assert_non_null(out->data);
  if (length > 0) {
    memcpy(out->data, data, length);
  }
  out->length = length;
}

static size_t find(const folder *in, const char *name) {
  size_t i = 0;
  while (i < in->count && strcmp(in->entries[i].name, name) != 0) {
    i++;
  }
  return i;
}

static void apply(folder *to, const change *made) {
  size_t at = find(to, made->name);
  if (made->kind == ADD) {
    assert_true(to->count < MOST_ENTRIES);
    (void)snprintf(to->entries[to->count].name, MOST_NAME, "%s", made->name);
    to->entries[to->count++].node = made->node;
  } else if (made->kind == REMOVE) {
    assert_true(at < to->count);
    to->entries[at] = to->entries[--to->count];
  } else if (made->kind == SWAP) {
    size_t other = find(to, made->other);
    int kept = to->entries[at].node;
    to->entries[at].node = to->entries[other].node;
    to->entries[other].node = kept;
  } else {
    size_t over = find(to, made->other);
    int moved = to->entries[at].node;
    to->entries[at] = to->entries[--to->count];
    over = find(to, made->other);
    if (over == to->count) {
      to->count++;
      (void)snprintf(to->entries[over].name, MOST_NAME, "%s", made->other);
    }
    to->entries[over].node = moved;
  }
}

static void make_change(int at, change_kind kind, const char *name, const char *other, int which) {
  change made = {.kind = kind, .node = which};
  node *in = &nodes[at];
  (void)snprintf(made.name, sizeof made.name, "%s", name);
  (void)snprintf(made.other, sizeof made.other, "%s", other);
  assert_true(in->change_count < MOST_CHANGES);
  in->changes[in->change_count++] = made;
  apply(&in->entries, &made);
}

/* The node of a path, -1: outside the root, or not there; the folder it is in, and its name there. */
static int resolve(const char *path, int *parent, const char **name) {
  size_t length = strlen(root);
  int at = 0;
  *parent = -1;
  if (strncmp(path, root, length) != 0 || (path[length] != '/' && path[length] != '\0')) {
    return -1;
  }
  path += length;
  while (*path == '/') {
    path++;
    size_t part = strcspn(path, "/");
    char word[MOST_NAME];
    (void)snprintf(word, sizeof word, "%.*s", (int)part, path);
    *parent = at;
    *name = path;
    size_t found = at < 0 ? 0 : find(&nodes[at].entries, word);
    at = at < 0 || found == nodes[at].entries.count ? -1 : nodes[at].entries.entries[found].node;
    path += part;
  }
  return at;
}

static void before_call(void) {
  if (disk_model_before != NULL) {
    outside = true;
    disk_model_before(calls);
    outside = false;
  }
  calls++;
}

static int model_open(const char *path, int flags, mode_t mode) {
  int parent = -1;
  const char *name = NULL;
  int at = resolve(path, &parent, &name);
  bool creates = (flags & O_CREAT) != 0 && at < 0 && parent >= 0;
  if (creates) {
    before_call();
  }
  int fd = even_os_real.open(path, flags, mode);
  if (fd >= 0 && creates) {
    at = new_node(false);
    make_change(parent, ADD, name, "", at);
  }
  if (fd >= 0) {
    assert_true(fd < MOST_DESCRIPTORS);
    of_descriptor[fd] = at + 1;
    offsets[fd] = 0;
  }
  return fd;
}

static int model_close(int fd) {
  of_descriptor[fd] = 0;
  return even_os_real.close(fd);
}

static void put(int fd, const void *data, size_t length, off_t offset) {
  node *file = &nodes[of_descriptor[fd] - 1];
  size_t end = (size_t)offset + length;
  if (end > file->now.length) {
    file->now.data = realloc(file->now.data, end + 1);
    assert_non_null(file->now.data);
    memset(file->now.data + file->now.length, 0, end - file->now.length);
    file->now.length = end;
  }
  memcpy(file->now.data + offset, data, length);
}

static ssize_t model_write(int fd, const void *data, size_t length) {
  if (of_descriptor[fd] == 0) {
    return even_os_real.write(fd, data, length);
  }
  before_call();
  ssize_t written = even_os_real.write(fd, data, length);
  if (written > 0) {
    put(fd, data, (size_t)written, offsets[fd]);
    offsets[fd] += written;
  }
  return written;
}

static ssize_t model_pwrite(int fd, const void *data, size_t length, off_t offset) {
  if (of_descriptor[fd] == 0) {
    return even_os_real.pwrite(fd, data, length, offset);
  }
  before_call();
  ssize_t written = even_os_real.pwrite(fd, data, length, offset);
  if (written > 0) {
    put(fd, data, (size_t)written, offset);
  }
  return written;
}

static int model_fallocate(int fd, int mode, off_t offset, off_t length) {
  if (of_descriptor[fd] == 0) {
    return even_os_real.fallocate(fd, mode, offset, length);
  }
  before_call();
  int failed = even_os_real.fallocate(fd, mode, offset, length);
  node *file = &nodes[of_descriptor[fd] - 1];
  if (failed == 0 && (size_t)(offset + length) > file->now.length) {
    put(fd, "", 1, offset + length - 1);
  }
  return failed;
}

/* What the disk says of itself; files of it are in memory. */
static int model_fstatfs(int fd, struct statfs *out) {
  int failed = even_os_real.fstatfs(fd, out);
  if (kind_of_disk != DISK_USUAL) {
    out->f_type = kind_of_disk == DISK_NFS ? 0x6969 : 0xEF53;
  }
  return failed;
}

/* What is shared is the file's own from then on, and no safer than what is written: a later fsync makes it so. */
static int model_ioctl(int fd, unsigned long request, void *argument) {
  const struct file_clone_range *range = argument;
  if (request != FICLONERANGE || kind_of_disk != DISK_SHARING) {
    return even_os_real.ioctl(fd, request, argument);
  }
  before_call();
  int failed = clones_ioctl(fd, request, argument);
  if (failed == 0) {
    put(fd, nodes[of_descriptor[range->src_fd] - 1].now.data + range->src_offset, (size_t)range->src_length,
        (off_t)range->dest_offset);
  }
  return failed;
}

static int model_link(const char *from, const char *to) {
  int parent = -1;
  const char *name = NULL;
  int at = resolve(from, &parent, &name);
  (void)resolve(to, &parent, &name);
  before_call();
  int failed = even_os_real.link(from, to);
  if (failed == 0) {
    make_change(parent, ADD, name, "", at);
  }
  return failed;
}

static int model_fsync(int fd) {
  if (of_descriptor[fd] == 0) {
    return even_os_real.fsync(fd);
  }
  before_call();
  int failed = even_os_real.fsync(fd);
  node *synced = &nodes[of_descriptor[fd] - 1];
  if (failed == 0 && synced->is_folder) {
    synced->safe_entries = synced->entries;
    synced->change_count = 0;
  } else if (failed == 0) {
    set_bytes(&synced->safe, synced->now.data, synced->now.length);
  }
  return failed;
}

static int model_rename(const char *from, const char *to) {
  int parent = -1;
  int other = -1;
  const char *name = NULL;
  const char *new_name = NULL;
  (void)resolve(from, &parent, &name);
  (void)resolve(to, &other, &new_name);
  before_call();
  int failed = even_os_real.rename(from, to);
  if (failed == 0) {
    assert_int_equal(parent, other); /* between folders nothing is moved */
    make_change(parent, MOVE, name, new_name, -1);
  }
  return failed;
}

static int model_exchange(const char *a, const char *b) {
  int parent = -1;
  int other = -1;
  const char *name = NULL;
  const char *new_name = NULL;
  (void)resolve(a, &parent, &name);
  (void)resolve(b, &other, &new_name);
  if (kind_of_disk == DISK_NFS) {
    errno = EINVAL;
    return -1;
  }
  before_call();
  int failed = even_os_real.exchange(a, b);
  if (failed == 0) {
    assert_int_equal(parent, other);
    make_change(parent, SWAP, name, new_name, -1);
  }
  return failed;
}

static int model_mkdir(const char *path, mode_t mode) {
  int parent = -1;
  const char *name = NULL;
  (void)resolve(path, &parent, &name);
  before_call();
  int failed = even_os_real.mkdir(path, mode);
  if (failed == 0) {
    make_change(parent, ADD, name, "", new_node(true));
  }
  return failed;
}

static int removed(int failed, int parent, const char *name) {
  if (failed == 0) {
    make_change(parent, REMOVE, name, "", -1);
  }
  return failed;
}

static int model_unlink(const char *path) {
  int parent = -1;
  const char *name = NULL;
  (void)resolve(path, &parent, &name);
  before_call();
  return removed(even_os_real.unlink(path), parent, name);
}

static int model_rmdir(const char *path) {
  int parent = -1;
  const char *name = NULL;
  (void)resolve(path, &parent, &name);
  before_call();
  return removed(even_os_real.rmdir(path), parent, name);
}

static int model_unlinkat(int at, const char *name, int flags) {
  before_call();
  int parent = of_descriptor[at] - 1;
  assert_true(parent >= 0);
  return removed(even_os_real.unlinkat(at, name, flags), parent, name);
}

/* ---- one at a time ---- */
#define ONE_AT_A_TIME(type, name, parameters, arguments) \
  static type locked_##name parameters {                 \
    if (outside) {                                       \
      return even_os_real.name arguments;                \
    }                                                    \
    (void)pthread_mutex_lock(&one_call);                 \
    type result = model_##name arguments;                \
    int reason = errno;                                  \
    (void)pthread_mutex_unlock(&one_call);               \
    errno = reason;                                      \
    return result;                                       \
  }

ONE_AT_A_TIME(int, open, (const char *path, int flags, mode_t mode), (path, flags, mode))
ONE_AT_A_TIME(int, close, (int fd), (fd))
ONE_AT_A_TIME(ssize_t, write, (int fd, const void *data, size_t length), (fd, data, length))
ONE_AT_A_TIME(ssize_t, pwrite, (int fd, const void *data, size_t length, off_t offset), (fd, data, length, offset))
ONE_AT_A_TIME(int, fallocate, (int fd, int mode, off_t offset, off_t length), (fd, mode, offset, length))
ONE_AT_A_TIME(int, ioctl, (int fd, unsigned long request, void *argument), (fd, request, argument))
ONE_AT_A_TIME(int, fsync, (int fd), (fd))
ONE_AT_A_TIME(int, link, (const char *from, const char *to), (from, to))
ONE_AT_A_TIME(int, rename, (const char *from, const char *to), (from, to))
ONE_AT_A_TIME(int, exchange, (const char *a, const char *b), (a, b))
ONE_AT_A_TIME(int, mkdir, (const char *path, mode_t mode), (path, mode))
ONE_AT_A_TIME(int, unlink, (const char *path), (path))
ONE_AT_A_TIME(int, rmdir, (const char *path), (path))
ONE_AT_A_TIME(int, unlinkat, (int at, const char *name, int flags), (at, name, flags))

/* What lies there already. */
static void read_folder(const char *path, int at) {
  DIR *stream = opendir(path);
  assert_non_null(stream);
  for (struct dirent *each = readdir(stream); each != NULL; each = readdir(stream)) {
    char below[1024];
    if (strcmp(each->d_name, ".") == 0 || strcmp(each->d_name, "..") == 0) {
      continue;
    }
    (void)snprintf(below, sizeof below, "%s/%s", path, each->d_name);
    int found = new_node(each->d_type == DT_DIR);
    make_change(at, ADD, each->d_name, "", found);
    if (each->d_type == DT_DIR) {
      read_folder(below, found);
    } else {
      struct stat facts;
      FILE *file = fopen(below, "rb");
      assert_non_null(file);
      assert_int_equal(stat(below, &facts), 0);
      char *data = malloc((size_t)facts.st_size + 1);
      assert_non_null(data);
      size_t length = fread(data, 1, (size_t)facts.st_size, file);
      (void)fclose(file);
      set_bytes(&nodes[found].now, data, length);
      set_bytes(&nodes[found].safe, data, length);
      free(data);
    }
  }
  (void)closedir(stream);
  nodes[at].safe_entries = nodes[at].entries;
  nodes[at].change_count = 0;
}

void disk_model_begin(const char *path, disk_kind kind) {
  kind_of_disk = kind;
  (void)snprintf(root, sizeof root, "%s", path);
  memset(of_descriptor, 0, sizeof of_descriptor);
  node_count = 0;
  calls = 0;
  read_folder(path, new_node(true));
  even_os.open = locked_open;
  even_os.close = locked_close;
  even_os.write = locked_write;
  even_os.pwrite = locked_pwrite;
  even_os.fallocate = locked_fallocate;
  even_os.fstatfs = model_fstatfs;
  even_os.ioctl = locked_ioctl;
  even_os.link = locked_link;
  even_os.fsync = locked_fsync;
  even_os.rename = locked_rename;
  even_os.exchange = locked_exchange;
  even_os.mkdir = locked_mkdir;
  even_os.rmdir = locked_rmdir;
  even_os.unlink = locked_unlink;
  even_os.unlinkat = locked_unlinkat;
}

long disk_model_calls(void) {
  return calls;
}

void disk_model_end(void) {
  if (disk_model_before != NULL) {
    outside = true;
    disk_model_before(calls);
    outside = false;
  }
  even_os = even_os_real;
  for (int i = 0; i < node_count; i++) {
    free(nodes[i].now.data);
    free(nodes[i].safe.data);
    nodes[i].now.data = nodes[i].safe.data = NULL;
  }
}

static unsigned draw(unsigned *seed, unsigned below) {
  *seed = *seed * 1103515245u + 12345u;
  return (*seed >> 16) % below;
}

/* Each block of what was written is there, or what was safe of it; the last may be torn. */
static void write_blocks(const node *file, FILE *stream, unsigned *seed) {
  const bytes *now = &file->now;
  const bytes *safe = &file->safe;
  size_t shortest = safe->length < now->length ? safe->length : now->length;
  size_t length = draw(seed, 2) == 0 ? now->length : shortest;
  size_t block = length / 64 > 32 ? length / 64 : 32;
  for (size_t at = 0; at < length; at += block) {
    size_t end = length - at < block ? length : at + block;
    const bytes *from = draw(seed, 2) == 0 ? now : safe;
    size_t known = from->length < end ? from->length : end;
    if (known > at) {
      assert_int_equal(fwrite(from->data + at, 1, known - at, stream), known - at);
    }
    for (size_t i = known > at ? known : at; i < end; i++) {
      (void)fputc(0, stream);
    }
  }
}

/* A part from the front, and zeros behind it. */
static void write_front(const node *file, FILE *stream, unsigned *seed) {
  const bytes *now = &file->now;
  size_t torn = now->length > 0 ? draw(seed, (unsigned)now->length) : 0;
  if (torn < file->safe.length) {
    torn = file->safe.length < now->length ? file->safe.length : now->length;
  }
  if (torn > 0) {
    assert_int_equal(fwrite(now->data, 1, torn, stream), torn);
  }
  for (size_t i = torn; i < now->length && draw(seed, 50) > 0; i++) {
    (void)fputc(0, stream);
  }
}

static bool is_safe(const node *file) {
  return file->safe.length == file->now.length &&
         (file->now.length == 0 || memcmp(file->safe.data, file->now.data, file->now.length) == 0);
}

static void write_file(const node *file, const char *path, disk_outcome outcome, unsigned *seed) {
  unsigned kind = outcome == DISK_SAFE_ONLY ? 0 : outcome == DISK_ALL ? 1 : draw(seed, 4);
  FILE *stream = fopen(path, "wb");
  assert_non_null(stream);
  if (kind < 2 || is_safe(file)) {
    const bytes *content = kind == 0 ? &file->safe : &file->now;
    assert_int_equal(content->length == 0 ? 0 : fwrite(content->data, 1, content->length, stream), content->length);
  } else if (kind == 2) {
    write_front(file, stream, seed);
  } else {
    write_blocks(file, stream, seed);
  }
  (void)fclose(stream);
}

static bool is_of(const change *made, const char *name) {
  return name[0] != '\0' && (strcmp(made->name, name) == 0 || strcmp(made->other, name) == 0);
}

/* Up to one of them, or any that have all they rest on. */
static void apply_some(folder *to, const node *in, unsigned *seed) {
  bool lost[MOST_CHANGES] = {false};
  bool in_order = draw(seed, 2) == 0;
  size_t count = in_order ? draw(seed, (unsigned)in->change_count + 1) : in->change_count;
  for (size_t i = 0; i < count; i++) {
    lost[i] = !in_order && draw(seed, 2) == 0;
    for (size_t j = 0; j < i && !lost[i]; j++) {
      lost[i] =
          lost[j] && (is_of(&in->changes[j], in->changes[i].name) || is_of(&in->changes[j], in->changes[i].other));
    }
    if (!lost[i]) {
      apply(to, &in->changes[i]);
    }
  }
}

static void write_folder(int at, const char *path, disk_outcome outcome, unsigned *seed) {
  folder found = outcome == DISK_ALL ? nodes[at].entries : nodes[at].safe_entries;
  if (outcome == DISK_MIXED) {
    apply_some(&found, &nodes[at], seed);
  }
  assert_int_equal(mkdir(path, 0755), 0);
  for (size_t i = 0; i < found.count; i++) {
    char below[1024];
    (void)snprintf(below, sizeof below, "%s/%s", path, found.entries[i].name);
    if (nodes[found.entries[i].node].is_folder) {
      write_folder(found.entries[i].node, below, outcome, seed);
    } else {
      write_file(&nodes[found.entries[i].node], below, outcome, seed);
    }
  }
}

void disk_model_cut(const char *into, disk_outcome outcome, unsigned seed) {
  write_folder(0, into, outcome, &seed);
}
