/* Checkpoints on a file system that other hosts see, played by made-up calls: it says that it is NFS, locks folders for
 * this host alone and files for all, or for this host alone, too; and it cannot swap folders. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "checkpoint/incoming.h"
#include "checkpoint/placing.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/folder.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char partial[] = "one" EVEN_CHECKPOINT_PARTIAL;

/* ---- made-up calls ---- */

/* A lock of another host's folder is none here. */
static int locks_of_files(int fd, int operation) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISDIR(facts.st_mode) ? 0 : even_os_real.flock(fd, operation);
}

/* Mounted with nolock: each host keeps its locks to itself, and host a's are the real ones. */
static int locks_of_one_host(int fd, int operation) {
  return strcmp(getenv("EVENSTEP_HOST_ID"), "a") == 0 ? even_os_real.flock(fd, operation) : 0;
}

static void host(const char *name) {
  assert_int_equal(setenv("EVENSTEP_HOST_ID", name, 1), 0);
}

static int make(void **state) {
  int failed = scratch_make(state);
  scratch_is_nfs();
  host("a");
  return failed;
}

static int end(void **state) {
  (void)unsetenv("EVENSTEP_HOST_ID");
  return scratch_remove(state);
}

/* ---- writers ---- */

static even_checkpoint_writer *begin(const char *name) {
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(name)};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  return writer;
}

static even_status add(even_checkpoint_writer *writer, const char *name) {
  even_checkpoint_tensor tensors[3];
  sample_tensors(tensors, 1);
  even_checkpoint_file file = {.size = sizeof file, .name = name, .tensors = tensors, .tensor_count = 3};
  return even_checkpoint_writer_add(writer, &file);
}

static void die_while_writing(const char *name) {
  int status = 0;
  pid_t child = fork();
  if (child == 0) {
    (void)!add(begin(name), "a");
    (void)raise(SIGKILL);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFSIGNALED(status));
}

/* Nothing in it was written to for years. */
static void make_old(const char *name) {
  const struct timespec old[2] = {{1000000000, 0}, {1000000000, 0}};
  DIR *stream = opendir(scratch_path(name));
  assert_non_null(stream);
  for (struct dirent *each = readdir(stream); each != NULL; each = readdir(stream)) {
    if (strcmp(each->d_name, "..") != 0) {
      assert_int_equal(utimensat(dirfd(stream), each->d_name, old, 0), 0);
    }
  }
  (void)closedir(stream);
  assert_int_equal(utimensat(AT_FDCWD, scratch_path(name), old, 0), 0);
}

static int64_t step_of(const char *name) {
  even_checkpoint_info info;
  assert_int_equal(even_checkpoint_verify(scratch_path(name), NULL), EVEN_OK);
  assert_int_equal(even_checkpoint_inspect(scratch_path(name), &info), EVEN_OK);
  int64_t step = info.step;
  even_checkpoint_info_free(&info);
  return step;
}

static int files_in(const char *name) {
  int count = 0;
  DIR *stream = opendir(scratch_path(name));
  assert_non_null(stream);
  for (struct dirent *each = readdir(stream); each != NULL; each = readdir(stream)) {
    count += each->d_name[0] != '.';
  }
  (void)closedir(stream);
  return count;
}

/* ---- who lives ---- */

static void a_checkpoint_is_the_same_there(void **state) {
  (void)state;
  int before = open_descriptors();
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(scratch_entries(), 1);
  assert_int_equal(files_in("one"), 3); /* two files and the manifest */
  assert_int_equal(step_of("one"), 1);
  even_checkpoint_writer_abandon(begin("two"));
  assert_int_equal(scratch_entries(), 1);
  assert_int_equal(open_descriptors(), before);
}

/* However long it is silent. */
static void a_living_writer_of_another_host_is_left_alone(void **state) {
  (void)state;
  even_os.flock = locks_of_files;
  even_checkpoint_writer *writer = begin("one");
  assert_int_equal(add(writer, "a"), EVEN_OK);
  make_old(partial);
  host("b");
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  assert_true(scratch_has(partial));
  assert_int_equal(save_sample(scratch_path("one"), false, 3), EVEN_ERR_IN_USE);
  host("a");
  assert_int_equal(even_checkpoint_writer_commit(writer, "{\"step\": 1}"), EVEN_OK);
  assert_int_equal(step_of("one"), 1);
  assert_int_equal(files_in("one"), 2);
  assert_int_equal(scratch_entries(), 2);
}

static void a_living_writer_of_this_host_is_left_alone(void **state) {
  (void)state;
  even_checkpoint_writer *writer = begin("one");
  make_old(partial);
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("one"), false, 3), EVEN_ERR_IN_USE);
  assert_int_equal(add(writer, "a"), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{\"step\": 1}"), EVEN_OK);
  assert_int_equal(step_of("one"), 1);
}

static void what_died_on_this_host_goes_at_once(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) { /* by its name, by the sweep */
    assert_int_equal(scratch_entries(), 0);
    die_while_writing("one");
    assert_true(scratch_has(partial));
    assert_int_equal(save_sample(scratch_path(i == 0 ? "one" : "two"), false, 1), EVEN_OK);
    assert_int_equal(scratch_entries(), 1);
    assert_int_equal(even_checkpoint_remove(scratch_path(i == 0 ? "one" : "two")), EVEN_OK);
  }
}

/* Its lock is free, but so it is where the mount has no locks between hosts. Nobody waits for its name. */
static void what_died_on_another_host_goes_in_time(void **state) {
  (void)state;
  die_while_writing("one");
  host("b");
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(step_of("one"), 1);
  assert_true(scratch_has(partial));
  make_old(partial);
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  assert_int_equal(scratch_entries(), 2);
}

static int clock_of_2100(clockid_t clock, struct timespec *out) {
  int failed = even_os_real.clock_gettime(clock, out);
  if (clock == CLOCK_REALTIME) {
    out->tv_sec = 4102444800;
  }
  return failed;
}

/* Ages are told by the file system's own clock. */
static void a_clock_that_is_ahead_sweeps_nobody(void **state) {
  (void)state;
  even_os.flock = locks_of_one_host;
  even_os.clock_gettime = clock_of_2100;
  die_while_writing("one");
  host("b");
  assert_int_equal(save_sample(scratch_path("two"), false, 1), EVEN_OK);
  assert_true(scratch_has(partial));
}

/* Where no lock reaches, a writer that was silent for long is taken for a dead one. It fails, and nothing half has the
 * name of a checkpoint. */
static void a_writer_that_was_swept_leaves_nothing_half(void **state) {
  (void)state;
  int before = open_descriptors();
  even_os.flock = locks_of_one_host;
  for (int added = 0; added < 2; added++) {
    even_checkpoint_writer *writer = begin("one");
    assert_int_equal(add(writer, "a"), EVEN_OK);
    make_old(partial);
    host("b");
    assert_int_equal(save_sample(scratch_path("two"), true, 2), EVEN_OK);
    assert_false(scratch_has(partial));
    host("a");
    if (added == 1) {
      assert_int_not_equal(add(writer, "b"), EVEN_OK);
    }
    assert_int_not_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
    assert_int_equal(scratch_entries(), 1);
  }
  assert_int_equal(open_descriptors(), before);
}

/* Another one has its name by then. */
static void a_writer_that_was_swept_leaves_the_next_alone(void **state) {
  (void)state;
  even_os.flock = locks_of_one_host;
  even_checkpoint_writer *first = begin("one");
  assert_int_equal(add(first, "a"), EVEN_OK);
  make_old(partial);
  host("b");
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  even_checkpoint_writer *second = begin("one");
  assert_int_equal(add(second, "b"), EVEN_OK);
  host("a");
  assert_int_equal(even_checkpoint_writer_commit(first, "{\"step\": 1}"), EVEN_ERR_STATE);
  assert_non_null(strstr(even_error_last()->what, "dead writer"));
  assert_true(scratch_has(partial));
  assert_int_equal(even_checkpoint_writer_commit(second, "{\"step\": 3}"), EVEN_OK);
  assert_int_equal(step_of("one"), 3);
  assert_int_equal(scratch_entries(), 2);
}

static even_checkpoint_writer *late;
static even_status of_late;

/* As its first file is about to go, the writer awakes. */
static int unlink_and_commit(int fd, const char *name, int flags) {
  if (late != NULL) {
    even_checkpoint_writer *writer = late;
    late = NULL;
    host("a");
    of_late = even_checkpoint_writer_commit(writer, "{}");
    host("b");
  }
  return even_os_real.unlinkat(fd, name, flags);
}

static void a_writer_that_awakes_while_it_is_swept_leaves_nothing_half(void **state) {
  (void)state;
  even_os.flock = locks_of_one_host;
  late = begin("one");
  assert_int_equal(add(late, "a"), EVEN_OK);
  make_old(partial);
  host("b");
  even_os.unlinkat = unlink_and_commit;
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  assert_null(late);
  assert_int_not_equal(of_late, EVEN_OK);
  assert_int_equal(scratch_entries(), 1);
}

/* ---- replacing without a swap ---- */

static void it_is_replaced_again_and_again(void **state) {
  (void)state;
  for (int step = 1; step <= 3; step++) {
    assert_int_equal(save_sample(scratch_path("best"), true, step), EVEN_OK);
    assert_int_equal(step_of("best"), step);
    assert_int_equal(scratch_entries(), 1);
    assert_int_equal(files_in("best"), 3);
  }
}

static long renames;
static long first_to_fail;
static long last_to_fail;
static char put_back_from[128];
static char put_back_to[128];

static int rename_or_fail(const char *from, const char *to) {
  renames++;
  if (renames >= first_to_fail && renames <= last_to_fail) {
    errno = EIO;
    return -1;
  }
  return even_os_real.rename(from, to);
}

/* Of a replacement: aside, in place, away; after a failure of the second, back. */
static void a_failed_rename_loses_neither(void **state) {
  (void)state;
  char *path = NULL;
  for (first_to_fail = 1; first_to_fail <= 3; first_to_fail++) {
    for (last_to_fail = first_to_fail; last_to_fail <= 3; last_to_fail++) {
      assert_int_equal(save_sample(scratch_path("best"), false, 1), EVEN_OK);
      renames = 0;
      even_os.rename = rename_or_fail;
      even_status status = save_sample(scratch_path("best"), true, 2);
      even_os.rename = even_os_real.rename;
      assert_int_equal(status == EVEN_OK, first_to_fail == 3);
      assert_int_equal(even_checkpoint_find_newest(scratch, true, &path), EVEN_OK);
      assert_non_null(path);
      even_free(path);
      assert_int_equal(save_sample(scratch_path("other"), false, 3), EVEN_OK); /* mends it */
      assert_int_equal(step_of("best"), first_to_fail == 3 ? 2 : 1);
      assert_int_equal(scratch_entries(), 2);
      assert_int_equal(even_checkpoint_remove(scratch_path("best")), EVEN_OK);
      assert_int_equal(even_checkpoint_remove(scratch_path("other")), EVEN_OK);
    }
  }
}

/* Another host's writer sweeps between the two renames: the older one has its name again. */
static int rename_after_a_sweep(const char *from, const char *to) {
  if (++renames == 2) {
    assert_int_equal(even_os_real.rename(put_back_from, put_back_to), 0);
  }
  return even_os_real.rename(from, to);
}

static void a_sweep_meanwhile_does_not_matter(void **state) {
  (void)state;
  (void)snprintf(put_back_from, sizeof put_back_from, "%s", scratch_path("best" EVEN_CHECKPOINT_REPLACED));
  (void)snprintf(put_back_to, sizeof put_back_to, "%s", scratch_path("best"));
  assert_int_equal(save_sample(scratch_path("best"), false, 1), EVEN_OK);
  renames = 0;
  even_os.rename = rename_after_a_sweep;
  assert_int_equal(save_sample(scratch_path("best"), true, 2), EVEN_OK);
  assert_true(renames > 3);
  assert_int_equal(step_of("best"), 2);
  assert_int_equal(scratch_entries(), 1);
}

/* A cut left the older one beside the newer: it does not come back when that is removed. */
static void what_was_replaced_does_not_come_back(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("best"), false, 2), EVEN_OK);
  assert_int_equal(rename(scratch_path("old"), scratch_path("best" EVEN_CHECKPOINT_REPLACED)), 0);
  assert_int_equal(even_checkpoint_remove(scratch_path("best")), EVEN_OK);
  assert_int_equal(scratch_entries(), 0);
}

/* A cut left it alone. Who writes it anew need not know of it. */
static void what_a_cut_left_is_replaced(void **state) {
  (void)state;
  for (int replace = 0; replace < 2; replace++) {
    assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
    assert_int_equal(rename(scratch_path("old"), scratch_path("best" EVEN_CHECKPOINT_REPLACED)), 0);
    assert_int_equal(save_sample(scratch_path("best"), replace == 1, 2), EVEN_OK);
    assert_int_equal(step_of("best"), 2);
    assert_int_equal(scratch_entries(), 1);
    assert_int_equal(even_checkpoint_remove(scratch_path("best")), EVEN_OK);
  }
}

/* ---- two hosts that want one name ---- */

/* As sshfs: a server of SFTP says that it failed, and not why. */
static int rename_as_sshfs(const char *from, const char *to) {
  int result = even_os_real.rename(from, to);
  if (result != 0 && errno == ENOTEMPTY) {
    errno = EPERM;
  }
  return result;
}

static void whoever_is_later_replaces(void **state) {
  (void)state;
  for (int as_sshfs = 0; as_sshfs < 2; as_sshfs++) {
    even_os.rename = as_sshfs ? rename_as_sshfs : even_os_real.rename;
    even_checkpoint_writer *writers[2];
    for (int i = 0; i < 2; i++) { /* of both nothing has the name as they begin */
      host(i == 0 ? "a" : "b");
      even_os.flock = locks_of_one_host;
      even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("best"), .replace = true};
      assert_int_equal(even_checkpoint_writer_open(&params, &writers[i]), EVEN_OK);
      assert_int_equal(add(writers[i], "a"), EVEN_OK);
    }
    host("a");
    assert_int_equal(even_checkpoint_writer_commit(writers[0], "{\"step\": 1}"), EVEN_OK);
    host("b");
    assert_int_equal(even_checkpoint_writer_commit(writers[1], "{\"step\": 2}"), EVEN_OK);
    assert_int_equal(step_of("best"), 2);
    assert_int_equal(scratch_entries(), 1);
    assert_int_equal(even_checkpoint_remove(scratch_path("best")), EVEN_OK);
  }
}

/* Another host's writer is between its two renames, and its second one comes after all of ours. */
static int rename_between_anothers(const char *from, const char *to) {
  if (++renames == 1) {
    assert_int_equal(even_os_real.rename(put_back_to, put_back_from), 0);
  }
  return even_os_real.rename(from, to);
}

static void a_name_that_is_gone_for_a_moment_is_taken(void **state) {
  (void)state;
  (void)snprintf(put_back_from, sizeof put_back_from, "%s", scratch_path("best" EVEN_CHECKPOINT_REPLACED));
  (void)snprintf(put_back_to, sizeof put_back_to, "%s", scratch_path("best"));
  assert_int_equal(save_sample(scratch_path("best"), false, 1), EVEN_OK);
  renames = 0;
  even_os.rename = rename_between_anothers;
  assert_int_equal(save_sample(scratch_path("best"), true, 2), EVEN_OK);
  assert_int_equal(step_of("best"), 2);
  assert_int_equal(scratch_entries(), 1);
}

/* Another host's writer had the name for the moment of the first rename. */
static int rename_to_a_moments_name(const char *from, const char *to) {
  if (++renames == 1) {
    errno = ENOTEMPTY;
    return -1;
  }
  return even_os_real.rename(from, to);
}

static int swap_with_nothing(const char *a, const char *b) {
  (void)a;
  assert_int_not_equal(access(b, F_OK), 0);
  errno = ENOENT;
  return -1;
}

/* This file system does swap: with what is there. */
static void a_name_that_is_gone_before_it_is_replaced_is_taken(void **state) {
  (void)state;
  even_os.exchange = swap_with_nothing;
  for (int there = 0; there < 2; there++) {
    even_checkpoint_writer *writer = NULL;
    even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("best"), .replace = true};
    if (there == 1) { /* as it is opened, and removed then */
      assert_int_equal(save_sample(scratch_path("best"), false, 1), EVEN_OK);
    }
    assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
    assert_int_equal(add(writer, "a"), EVEN_OK);
    if (there == 1) {
      assert_int_equal(rename(scratch_path("best"), scratch_path("away")), 0);
    }
    renames = 0;
    even_os.rename = there == 1 ? even_os_real.rename : rename_to_a_moments_name;
    assert_int_equal(even_checkpoint_writer_commit(writer, "{\"step\": 2}"), EVEN_OK);
    even_os.rename = even_os_real.rename;
    assert_int_equal(step_of("best"), 2);
    assert_int_equal(scratch_entries(), 1 + there);
    assert_int_equal(even_checkpoint_remove(scratch_path("best")), EVEN_OK);
  }
}

/* Somebody makes and removes it all the time: it ends. */
static int rename_to_what_is_taken(const char *from, const char *to) {
  (void)from;
  (void)to;
  renames++;
  errno = ENOTEMPTY;
  return -1;
}

static void a_name_that_comes_and_goes_is_given_up(void **state) {
  (void)state;
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("best"), .replace = true};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(add(writer, "a"), EVEN_OK);
  renames = 0;
  even_os.rename = rename_to_what_is_taken;
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_ERR_IN_USE);
  assert_in_range(renames, 2, 64);
  even_os.rename = even_os_real.rename;
  assert_int_equal(scratch_entries(), 0);
}

/* Once the newer one has its name, another host has settled the older one, and begins the next under the partial name.
 */
static int rename_and_begin_another(const char *from, const char *to) {
  int result = even_os_real.rename(from, to);
  if (++renames == 2) {
    assert_int_equal(even_os_real.rename(put_back_from, put_back_to), 0);
    assert_int_equal(mkdir(scratch_path(partial), 0777), 0);
    int fd = open(scratch_path("one" EVEN_CHECKPOINT_PARTIAL "/begun"), O_CREAT | O_WRONLY, 0666);
    assert_true(fd >= 0);
    (void)close(fd);
  }
  return result;
}

static void what_another_writes_under_the_name_of_before_stays(void **state) {
  (void)state;
  (void)snprintf(put_back_from, sizeof put_back_from, "%s", scratch_path("one" EVEN_CHECKPOINT_REPLACED));
  (void)snprintf(put_back_to, sizeof put_back_to, "%s", scratch_path("settled"));
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  renames = 0;
  even_os.rename = rename_and_begin_another;
  assert_int_equal(save_sample(scratch_path("one"), true, 2), EVEN_OK);
  assert_int_equal(step_of("one"), 2);
  assert_true(scratch_has("one" EVEN_CHECKPOINT_PARTIAL "/begun"));
}

static uid_t another_user(void) {
  return getuid() + 1;
}

static void replaced_ones_of_others_stay(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
  assert_int_equal(rename(scratch_path("old"), scratch_path("best" EVEN_CHECKPOINT_REPLACED)), 0);
  even_os.geteuid = another_user;
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  assert_true(scratch_has("best" EVEN_CHECKPOINT_REPLACED));
}

static void one_that_comes_takes_anothers_place(void **state) {
  (void)state;
  even_text manifest = EVEN_TEXT_EMPTY;
  even_checkpoint_incoming *incoming = NULL;
  bool linked = false;
  assert_int_equal(save_sample(scratch_path("here"), false, 2), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("there"), false, 1), EVEN_OK);
  assert_int_equal(even_file_read(scratch_path("here/manifest.json"), 1 << 20, &manifest), EVEN_OK);
  assert_int_equal(
      even_checkpoint_incoming_open(scratch_path("there"), true, manifest.data, manifest.length, &incoming), EVEN_OK);
  assert_int_equal(even_checkpoint_incoming_link(incoming, 0, scratch_path("here/model.safetensors"), &linked),
                   EVEN_OK);
  assert_int_equal(even_checkpoint_incoming_link(incoming, 1, scratch_path("here/optimizer.safetensors"), &linked),
                   EVEN_OK);
  assert_int_equal(even_checkpoint_incoming_commit(incoming), EVEN_OK);
  even_text_free(&manifest);
  assert_int_equal(step_of("there"), 2);
  assert_int_equal(files_in("there"), 3);
  assert_int_equal(scratch_entries(), 2);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, make, end)
  const struct CMUnitTest tests[] = {
      CASE(a_checkpoint_is_the_same_there),
      CASE(a_living_writer_of_another_host_is_left_alone),
      CASE(a_living_writer_of_this_host_is_left_alone),
      CASE(what_died_on_this_host_goes_at_once),
      CASE(what_died_on_another_host_goes_in_time),
      CASE(a_clock_that_is_ahead_sweeps_nobody),
      CASE(a_writer_that_was_swept_leaves_nothing_half),
      CASE(a_writer_that_was_swept_leaves_the_next_alone),
      CASE(a_writer_that_awakes_while_it_is_swept_leaves_nothing_half),
      CASE(it_is_replaced_again_and_again),
      CASE(a_failed_rename_loses_neither),
      CASE(a_sweep_meanwhile_does_not_matter),
      CASE(what_was_replaced_does_not_come_back),
      CASE(what_a_cut_left_is_replaced),
      CASE(whoever_is_later_replaces),
      CASE(a_name_that_is_gone_for_a_moment_is_taken),
      CASE(a_name_that_is_gone_before_it_is_replaced_is_taken),
      CASE(a_name_that_comes_and_goes_is_given_up),
      CASE(what_another_writes_under_the_name_of_before_stays),
      CASE(replaced_ones_of_others_stay),
      CASE(one_that_comes_takes_anothers_place),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
