/* Scratch folders and sample checkpoints. */
#include "checkpoint/scratch.h"

#include "base/fail.h"
#include "os/calls.h"
#include "support/fault.h"
#include "support/nfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

char scratch[64];

static const char prefix[] = "evenstep-checkpoint-";

static int remove_entry(const char *path, const struct stat *facts, int kind, struct FTW *place) {
  (void)facts;
  (void)kind;
  (void)place;
  return remove(path);
}

int scratch_remove_tree(const char *path) {
  return nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* Of test programs that were killed: the number of the process is in the name. Younger ones stay: a process whose
 * number is not known here may live in a container that shares the folder. */
enum { OLD_SECONDS = 3600 };

static void sweep(const char *parent) {
  DIR *folder = opendir(parent);
  if (folder == NULL) {
    return;
  }
  for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
    char path[sizeof entry->d_name + 16];
    char *end = NULL;
    struct stat facts;
    if (strncmp(entry->d_name, prefix, sizeof prefix - 1) != 0) {
      continue;
    }
    long process = strtol(entry->d_name + sizeof prefix - 1, &end, 10);
    bool gone = process > 0 && process <= INT_MAX && *end == '-' && kill((pid_t)process, 0) != 0 && errno == ESRCH;
    (void)snprintf(path, sizeof path, "%s/%s", parent, entry->d_name);
    if (gone && lstat(path, &facts) == 0 && time(NULL) - facts.st_mtime > OLD_SECONDS) {
      (void)scratch_remove_tree(path);
    }
  }
  (void)closedir(folder);
}

int scratch_make(void **state) {
  static bool swept = false;
  /* in memory where possible: hundreds of saves, each with its syncs */
  const char *parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  (void)state;
  fault_reset();
  if (!swept) {
    sweep(parent);
    swept = true;
  }
  (void)snprintf(scratch, sizeof scratch, "%s/%s%ld-XXXXXX", parent, prefix, (long)getpid());
  return mkdtemp(scratch) == NULL ? -1 : 0;
}

int scratch_remove(void **state) {
  (void)state;
  fault_reset();
  return scratch_remove_tree(scratch);
}

const char *scratch_path(const char *name) {
  static char paths[8][256];
  static int next = 0;
  char *path = paths[next++ % 8];
  (void)snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
  return path;
}

bool scratch_has(const char *name) {
  return access(scratch_path(name), F_OK) == 0;
}

int scratch_entries(void) {
  int count = 0;
  DIR *folder = opendir(scratch);
  for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
    count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
  }
  (void)closedir(folder);
  return count;
}

static int no_exchange(const char *a, const char *b) {
  (void)a;
  (void)b;
  errno = EINVAL;
  return -1;
}

void scratch_is_nfs(void) {
  even_os.fstatfs = statfs_of_nfs;
  even_os.exchange = no_exchange;
}

void sample_tensors(even_checkpoint_tensor *tensors, int seed) {
  static const int64_t matrix[] = {3, 5};
  static const int64_t vector[] = {7};
  static const int64_t none[] = {0, 4};
  static float weights[15];
  static unsigned char flags[7];
  for (int i = 0; i < 15; i++) {
    weights[i] = (float)(seed * 100 + i);
  }
  for (int i = 0; i < 7; i++) {
    flags[i] = (unsigned char)((seed + i) % 2);
  }
  tensors[0] = (even_checkpoint_tensor){"flags", "BOOL", vector, 1, flags, sizeof flags};
  tensors[1] = (even_checkpoint_tensor){"weights", "F32", matrix, 2, weights, sizeof weights};
  tensors[2] = (even_checkpoint_tensor){"nothing", "I64", none, 2, NULL, 0};
}

static even_status save(const char *folder, bool replace, int seed, int other) {
  even_checkpoint_tensor tensors[3];
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_params params = {.size = sizeof params, .folder = folder, .replace = replace};
  even_checkpoint_file file = {.size = sizeof file, .name = "model.safetensors", .tensors = tensors, .tensor_count = 3};
  sample_tensors(tensors, seed);
  EVEN_TRY(even_checkpoint_writer_open(&params, &writer));
  even_status status = even_checkpoint_writer_add(writer, &file);
  if (status == EVEN_OK) {
    file.name = "optimizer.safetensors";
    sample_tensors(tensors, other);
    status = even_checkpoint_writer_add(writer, &file);
  }
  if (status != EVEN_OK) {
    even_checkpoint_writer_abandon(writer);
    return status;
  }
  char state[256];
  (void)snprintf(
      state, sizeof state,
      "{\"step\": %d, \"epoch\": 1, \"world_size\": 2, \"models\": {\"m\": {\"file\": \"model.safetensors\"}}, "
      "\"optimizers\": {\"o\": {\"file\": \"optimizer.safetensors\"}}}",
      seed);
  return even_checkpoint_writer_commit(writer, state);
}

even_status save_sample(const char *folder, bool replace, int seed) {
  return save(folder, replace, seed, seed);
}

off_t scratch_size(const char *name) {
  struct stat facts;
  assert_int_equal(stat(scratch_path(name), &facts), 0);
  return facts.st_size;
}

void scratch_flip(const char *name, off_t offset, unsigned bit) {
  unsigned char byte = 0;
  int fd = open(scratch_path(name), O_RDWR);
  assert_true(fd >= 0);
  assert_int_equal(pread(fd, &byte, 1, offset), 1);
  byte ^= (unsigned char)(1u << bit);
  assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
  (void)close(fd);
}

even_status save_two(const char *folder, int model, int optimizer) {
  return save(folder, false, model, optimizer);
}
