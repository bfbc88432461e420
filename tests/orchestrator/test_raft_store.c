/* A member's memory: what is in the file, what is none, one process a member, a disk that is full. */
#include "orchestrator/raft_store.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/folder.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[] = "/tmp/evenstep-store-XXXXXX";

static int make_folder(void **state) {
  (void)state;
  (void)snprintf(folder, sizeof folder, "/tmp/evenstep-store-XXXXXX");
  return mkdtemp(folder) == NULL ? -1 : 0;
}

static int remove_folder(void **state) {
  char path[80];
  (void)state;
  even_os = even_os_real;
  (void)snprintf(path, sizeof path, "%s/members/7", folder);
  (void)!even_folder_remove(path);
  (void)snprintf(path, sizeof path, "%s/members", folder);
  (void)rmdir(path);
  return rmdir(folder);
}

static void open_store(even_raft_store *store, bool expected) {
  char path[80];
  bool known = !expected;
  (void)snprintf(path, sizeof path, "%s/members", folder);
  assert_int_equal(even_raft_store_open(store, path, 7, &known), EVEN_OK);
  assert_int_equal(known, expected);
}

static void fill(even_raft_store *store) {
  unsigned char first[] = "first";
  unsigned char third[] = "third";
  const even_raft_kept entries[] = {{1, 3, sizeof first, first}, {2, 1, 0, NULL}, {2, 1, sizeof third, third}};
  assert_int_equal(even_raft_store_term(store, 2), EVEN_OK);
  assert_int_equal(even_raft_store_vote(store, 5), EVEN_OK);
  assert_int_equal(even_raft_store_append(store, entries, 3), EVEN_OK);
}

static void what_it_keeps_is_there_again(void **state) {
  even_raft_store store;
  (void)state;
  open_store(&store, false);
  fill(&store);
  even_raft_store_close(&store, false);
  open_store(&store, true);
  assert_int_equal(store.term, 2);
  assert_int_equal(store.vote, 5);
  assert_int_equal(store.count, 3);
  assert_int_equal(store.entries[0].type, 3);
  assert_int_equal(store.entries[1].bytes, 0);
  assert_int_equal(store.entries[2].term, 2);
  assert_memory_equal(store.entries[2].data, "third", 6);
  assert_int_equal(even_raft_store_truncate(&store, 2), EVEN_OK);
  assert_int_equal(even_raft_store_term(&store, 3), EVEN_OK);
  even_raft_store_close(&store, false);
  open_store(&store, true);
  assert_int_equal(store.count, 1);
  assert_int_equal(store.term, 3);
  assert_int_equal(store.vote, 0); /* it was the earlier term's */
  even_raft_store_close(&store, true);
  open_store(&store, false);
  even_raft_store_close(&store, true);
}

static void one_process_is_a_member(void **state) {
  even_raft_store store;
  even_raft_store other;
  char path[80];
  bool known = false;
  (void)state;
  open_store(&store, false);
  (void)snprintf(path, sizeof path, "%s/members", folder);
  assert_int_equal(even_raft_store_open(&other, path, 7, &known), EVEN_ERR_IN_USE);
  even_raft_store_close(&store, true);
}

/* Every bit that differs is found, and every end that is missing. */
static void a_damaged_file_is_none(void **state) {
  even_raft_store store = {.folder = EVEN_TEXT_EMPTY, .lock = -1, .member = 7};
  even_text bytes = EVEN_TEXT_EMPTY;
  (void)state;
  fill(&store);
  assert_int_equal(even_raft_store_write(&store, &bytes), EVEN_OK);
  for (size_t i = 0; i < 8 * bytes.length; i++) {
    even_raft_store read = {.folder = EVEN_TEXT_EMPTY, .lock = -1, .member = 7};
    bytes.data[i / 8] ^= (char)(1 << i % 8);
    assert_int_equal(even_raft_store_read(&read, bytes.data, bytes.length), EVEN_ERR_CORRUPT);
    bytes.data[i / 8] ^= (char)(1 << i % 8);
    assert_int_equal(read.count, 0);
    even_raft_store_close(&read, false);
  }
  for (size_t length = 0; length < bytes.length; length++) {
    even_raft_store read = {.folder = EVEN_TEXT_EMPTY, .lock = -1, .member = 7};
    assert_int_equal(even_raft_store_read(&read, bytes.data, length), EVEN_ERR_CORRUPT);
    even_raft_store_close(&read, false);
  }
  even_raft_store other = {.folder = EVEN_TEXT_EMPTY, .lock = -1, .member = 8};
  assert_int_equal(even_raft_store_read(&other, bytes.data, bytes.length), EVEN_ERR_CORRUPT);
  even_text_free(&bytes);
  even_raft_store_close(&store, false);
}

static unsigned folders_synced;

static int no_space(int fd) {
  (void)fd;
  errno = ENOSPC;
  return -1;
}

/* A folder's names need none. */
static int no_space_for_files(int fd) {
  struct stat what;
  assert_int_equal(fstat(fd, &what), 0);
  if (!S_ISDIR(what.st_mode)) {
    return no_space(fd);
  }
  folders_synced++;
  return 0;
}

static int cannot_unlink(const char *path) {
  (void)path;
  errno = EIO;
  return -1;
}

/* It goes on in memory, and leaves no file behind that says less than it said, whatever becomes of the machine. */
static void a_full_disk_costs_its_return(void **state) {
  even_raft_store store;
  (void)state;
  open_store(&store, false);
  fill(&store);
  folders_synced = 0;
  even_os.fsync = no_space_for_files;
  assert_int_equal(even_raft_store_term(&store, 9), EVEN_OK);
  even_os = even_os_real;
  assert_int_equal(folders_synced, 1);
  assert_int_equal(store.term, 9);
  assert_int_equal(even_raft_store_vote(&store, 1), EVEN_OK);
  even_raft_store_close(&store, false);
  open_store(&store, false);
  even_raft_store_close(&store, true);
}

static void see_as_filled(const even_raft_store *store) {
  assert_int_equal(store->term, 2);
  assert_int_equal(store->vote, 5);
  assert_int_equal(store->count, 3);
  assert_memory_equal(store->entries[2].data, "third", 6);
}

/* The disk takes neither the file, nor that there is none: nothing of what was asked for is so, and later all may be.
 */
static void what_cannot_be_kept_is_undone(void **state) {
  unsigned char fourth[] = "fourth";
  const even_raft_kept entry = {2, 1, sizeof fourth, fourth};
  even_raft_store store;
  (void)state;
  open_store(&store, false);
  fill(&store);
  for (int i = 0; i < 2; i++) {
    even_os.fsync = no_space;
    even_os.unlink = i == 0 ? cannot_unlink : even_os_real.unlink;
    assert_int_not_equal(even_raft_store_term(&store, 9), EVEN_OK);
    assert_int_not_equal(even_raft_store_vote(&store, 1), EVEN_OK);
    assert_int_not_equal(even_raft_store_append(&store, &entry, 1), EVEN_OK);
    assert_int_not_equal(even_raft_store_append(&store, &entry, 1), EVEN_OK);
    assert_int_not_equal(even_raft_store_truncate(&store, 2), EVEN_OK);
    even_os = even_os_real;
    see_as_filled(&store);
  }
  assert_int_equal(even_raft_store_append(&store, &entry, 1), EVEN_OK);
  even_raft_store_close(&store, false);
  open_store(&store, true);
  assert_int_equal(store.count, 4);
  assert_memory_equal(store.entries[3].data, "fourth", 7);
  even_raft_store_close(&store, true);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_it_keeps_is_there_again, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(one_process_is_a_member, make_folder, remove_folder),
      cmocka_unit_test(a_damaged_file_is_none),
      cmocka_unit_test_setup_teardown(a_full_disk_costs_its_return, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(what_cannot_be_kept_is_undone, make_folder, remove_folder),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
