/* Checkpoints that come to a host, by real parcels over loopback: each is there once, whole, or not at all, whatever
 * becomes of the thread that compares it, and of the leader that sent it. */
#include "orchestrator/bring.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/parcel_star.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/stream.h"
#include "support/fault.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST = 1 << 20 };

static const double patience_s = 120;

static star at;
static even_bring_take *take;
static even_bring_kept kept;
static even_text said; /* the last words to the leader */
static even_text left; /* what the host's agent has left of `kept` so far */
static int told;

static void tell(void *context, even_text *text) {
  (void)context;
  even_text_free(&said);
  said = *text;
  told++;
}

static void open_take(void) {
  told = 0;
  assert_int_equal(even_bring_take_open(at.hosts[1].parcels, 0, &kept, tell, NULL, &take), EVEN_OK);
}

static int set_up(void **state) {
  kept = (even_bring_kept){.host = NULL};
  take = NULL;
  return scratch_make(state) == 0 && star_open(&at) == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  even_bring_take_close(take);
  star_close(&at);
  even_bring_kept_free(&kept);
  even_text_free(&said);
  even_text_free(&left);
  return scratch_remove(state);
}

static void nap(void) {
  (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static double now_s(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- the leader's part ---- */

/* The checkpoint in `from` shall lie in `to`. */
static void ask(uint64_t serial, const char *from, const char *to) {
  char path[160];
  char digits[17];
  even_text manifest = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "%s/%s", from, EVEN_CHECKPOINT_MANIFEST);
  assert_int_equal(even_file_read(path, MOST, &manifest), EVEN_OK);
  (void)snprintf(digits, sizeof digits, "%016" PRIx64, even_checkpoint_checksum(manifest.data, manifest.length));
  even_text_free(&manifest);
  json_t *wish = json_pack("{s:I,s:s,s:s,s:s}", "serial", (json_int_t)serial, "folder", to, "other",
                           scratch_path("other"), "sum", digits);
  assert_int_equal(even_bring_take_hear(take, wish), EVEN_OK);
  json_decref(wish);
}

static void sent(void *context, const even_parcel *parcel, const even_error *why) {
  star_offer *offer = context;
  (void)parcel;
  offer->told++;
  offer->received = why == NULL;
}

static void send_file(uint64_t number, const char *folder, const char *name) {
  char path[160];
  even_input input;
  star_offer offer = {0};
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  assert_int_equal(even_input_open(path, &input), EVEN_OK);
  assert_int_equal(
      even_parcels_offer(at.hosts[0].parcels, 1, EVEN_BRING_PARCEL, number, input.fd, input.bytes, sent, &offer),
      EVEN_OK);
  assert_int_equal(star_turn(&at, &offer.told, 1), EVEN_OK);
  assert_true(offer.received);
}

/* Asks, and sends all of it, which is whole there then but for its end. */
static void bring(uint64_t serial, const char *from, const char *to) {
  even_checkpoint_info info;
  ask(serial, from, to);
  assert_non_null(strstr(said.data, "\"holds\":false"));
  assert_int_equal(even_checkpoint_inspect(from, &info), EVEN_OK);
  send_file(serial * EVEN_BRING_FILES, from, EVEN_CHECKPOINT_MANIFEST);
  for (size_t i = 0; i < info.file_count; i++) {
    send_file(serial * EVEN_BRING_FILES + 1 + i, from, info.files[i].name);
  }
  even_checkpoint_info_free(&info);
}

static void await_words(int count) {
  double until = now_s() + patience_s;
  while (told < count && now_s() < until) {
    even_bring_take_tick(take);
    nap();
  }
  assert_int_equal(told, count);
}

/* ---- what is to hold ---- */

static void the_one_before_goes_also_with_another_leader(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  open_take();
  bring(1, scratch_path("one"), scratch_path("there/one"));
  await_words(2);
  assert_non_null(strstr(said.data, "there/one"));
  assert_int_equal(even_checkpoint_verify(scratch_path("there/one"), NULL), EVEN_OK);
  even_bring_take_close(take);
  open_take();
  bring(1, scratch_path("two"), scratch_path("there/two"));
  assert_true(scratch_has("there/one")); /* until the next one is whole, and known to be */
  await_words(2);
  assert_int_equal(even_checkpoint_verify(scratch_path("there/two"), NULL), EVEN_OK);
  assert_false(scratch_has("there/one"));
  ask(2, scratch_path("two"), scratch_path("there/two"));
  assert_non_null(strstr(said.data, "\"holds\":true"));
}

/* Its end is there before anybody looks; then it is given up, by the end of the leader or by its next question. */
static void without_a_thread_it_ends_once(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  open_take();
  fault_os_from(FAULT_thread_create, 1, EAGAIN);
  bring(1, scratch_path("one"), scratch_path("there/one"));
  assert_int_equal(fault_os_calls(FAULT_thread_create), 1);
  assert_int_equal(even_checkpoint_verify(scratch_path("there/one"), NULL), EVEN_OK);
  bring(2, scratch_path("two"), scratch_path("there/two"));
  assert_true(scratch_has("there/one")); /* as long as the leader has not let go of the other one */
  even_bring_take_close(take);
  take = NULL;
  assert_int_equal(even_checkpoint_verify(scratch_path("there/two"), NULL), EVEN_OK);
  assert_false(scratch_has("there/one"));
  assert_string_equal(even_text_string(&kept.disk), scratch_path("there/two"));
}

/* ---- the host's agent is killed, and another one goes on ---- */

static bool named_already;

static void leave(void *context) {
  (void)context;
  even_text_clear(&left);
  even_json json = even_json_begin(&left, 0);
  even_json_object(&json, NULL);
  even_bring_kept_write(&kept, &json);
  even_json_object_end(&json);
  named_already = kept.coming.length > 0 && access(kept.coming.data, F_OK) == 0;
}

static void read_left(const even_text *from) {
  json_t *content = NULL;
  assert_int_equal(even_json_parse("it", from->data, from->length, &content), EVEN_OK);
  even_bring_kept_free(&kept);
  assert_int_equal(even_bring_kept_read(&kept, content), EVEN_OK);
  json_decref(content);
}

/* Killed when both lie there, whether it had left word of the end or not; and before the second was there. */
static void what_came_is_known_to_the_next_agent(void **state) {
  even_text before = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  kept.changed = leave;
  open_take();
  fault_os_from(FAULT_thread_create, 1, EAGAIN); /* it is named before anybody looks */
  bring(1, scratch_path("one"), scratch_path("there/one"));
  assert_false(named_already);
  await_words(2);
  assert_non_null(strstr(said.data, "\"came\":true"));
  bring(2, scratch_path("two"), scratch_path("there/two"));
  assert_false(named_already);
  even_text_add(&before, even_text_string(&left));
  assert_true(scratch_has("there/one") && scratch_has("there/two"));
  even_bring_kept now = kept; /* of the agent that is killed now, but for its folders */
  kept = (even_bring_kept){.host = NULL};
  read_left(&before);
  assert_string_equal(even_text_string(&kept.disk), scratch_path("there/two"));
  assert_false(scratch_has("there/one"));
  assert_int_equal(even_checkpoint_remove(scratch_path("there/two")), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("there/one"), false, 1), EVEN_OK);
  read_left(&before); /* as if it had been killed before it named it */
  assert_string_equal(even_text_string(&kept.disk), scratch_path("there/one"));
  assert_true(scratch_has("there/one"));
  even_bring_kept_free(&kept);
  kept = now;
  fault_reset();
  even_text_free(&before);
}

/* What has its place by then is somebody else's: it goes with no copy. */
static void what_could_not_be_named_is_not_kept(void **state) {
  char command[320];
  (void)state;
  assert_int_equal(save_two(scratch_path("one"), 1, 2), EVEN_OK);
  kept.changed = leave;
  open_take();
  ask(1, scratch_path("one"), scratch_path("there/one"));
  send_file(EVEN_BRING_FILES, scratch_path("one"), EVEN_CHECKPOINT_MANIFEST);
  (void)snprintf(command, sizeof command, "cp -r %s %s", scratch_path("one"), scratch_path("there/one"));
  assert_int_equal(system(command), 0);
  send_file(EVEN_BRING_FILES + 1, scratch_path("one"), "model.safetensors");
  send_file(EVEN_BRING_FILES + 2, scratch_path("one"), "optimizer.safetensors");
  await_words(2);
  assert_non_null(strstr(said.data, "\"came\":false"));
  read_left(&left);
  assert_int_equal(kept.disk.length, 0);
  assert_true(scratch_has("there/one"));
}

static pthread_t of_agent;

/* A disk on which it takes until nobody waits for it any more. */
static int sync_until_unwanted(int fd) {
  double until = now_s() + patience_s;
  (void)fd;
  if (pthread_equal(pthread_self(), of_agent)) {
    return 0;
  }
  while (!even_stop_asked() && now_s() < until) {
    nap();
  }
  return 0;
}

static void what_nobody_wants_any_more_ends_early(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  open_take();
  of_agent = pthread_self();
  even_os.fsync = sync_until_unwanted;
  bring(1, scratch_path("one"), scratch_path("there/one"));
  even_bring_take_close(take);
  take = NULL;
  assert_false(scratch_has("there/one"));
  assert_int_equal(kept.disk.length, 0);
}

/* ---- to memory ---- */

static void ask_memory(uint64_t serial, const char *from) {
  char digits[17];
  char path[160];
  even_text manifest = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "%s/%s", from, EVEN_CHECKPOINT_MANIFEST);
  assert_int_equal(even_file_read(path, MOST, &manifest), EVEN_OK);
  (void)snprintf(digits, sizeof digits, "%016" PRIx64, even_checkpoint_checksum(manifest.data, manifest.length));
  even_text_free(&manifest);
  json_t *wish = json_pack("{s:I,s:s,s:s,s:s,s:b,s:b}", "serial", (json_int_t)serial, "folder", from, "other",
                           scratch_path("other"), "sum", digits, "memory", 1, "unseen", 1);
  assert_int_equal(even_bring_take_hear(take, wish), EVEN_OK);
  json_decref(wish);
}

static bool is_there(const char *name, uint64_t *links) {
  char path[256];
  struct stat facts;
  (void)snprintf(path, sizeof path, "%s/%s", even_text_string(&kept.host->folder), name);
  bool there = stat(path, &facts) == 0;
  *links = there ? (uint64_t)facts.st_nlink : 0;
  return there;
}

/* The first checkpoint, "one", whole to this host's memory: the first question. */
static void bring_one(void) {
  assert_int_equal(setenv("EVENSTEP_MEMORY_DIR", scratch, 1), 0);
  assert_int_equal(save_two(scratch_path("one"), 1, 2), EVEN_OK);
  open_take();
  ask_memory(1, scratch_path("one"));
  assert_non_null(strstr(said.data, "\"holds\":false")); /* though its path is seen here */
  send_file(EVEN_BRING_FILES, scratch_path("one"), EVEN_CHECKPOINT_MANIFEST);
  send_file(EVEN_BRING_FILES + 1, scratch_path("one"), "model.safetensors");
  send_file(EVEN_BRING_FILES + 2, scratch_path("one"), "optimizer.safetensors");
  await_words(2);
}

/* Two checkpoints of which one file is the same: it is not sent again, and the newer one keeps it when the older
 * goes. */
static void memory_has_the_newest_and_what_has_not_changed_is_not_sent(void **state) {
  uint64_t links = 0;
  (void)state;
  bring_one();
  assert_int_equal(save_two(scratch_path("two"), 1, 3), EVEN_OK);
  assert_non_null(strstr(said.data, "\"holds\":true"));
  assert_true(is_there("one", &links));
  ask_memory(2, scratch_path("two"));
  send_file(2 * EVEN_BRING_FILES, scratch_path("two"), EVEN_CHECKPOINT_MANIFEST);
  assert_non_null(strstr(said.data, "\"had\":[1]"));
  assert_true(is_there("one/model.safetensors", &links) && links == 2);
  send_file(2 * EVEN_BRING_FILES + 2, scratch_path("two"), "optimizer.safetensors");
  await_words(5);
  assert_false(is_there("one", &links));
  assert_true(is_there("two/model.safetensors", &links) && links == 1);
  char path[256];
  (void)snprintf(path, sizeof path, "%s/two", even_text_string(&kept.host->folder));
  assert_int_equal(even_checkpoint_verify(path, NULL), EVEN_OK);
  assert_int_equal(kept.disk.length, 0);
}

/* Of a copy that is cut off, whatever of it came, the one before is what there is. */
static void a_torn_copy_leaves_the_one_before(void **state) {
  uint64_t links = 0;
  (void)state;
  bring_one();
  assert_int_equal(save_two(scratch_path("two"), 3, 4), EVEN_OK);
  for (int files = 0; files < 3; files++) {
    uint64_t serial = (uint64_t)files + 2;
    ask_memory(serial, scratch_path("two"));
    if (files > 0) {
      send_file(serial * EVEN_BRING_FILES, scratch_path("two"), EVEN_CHECKPOINT_MANIFEST);
    }
    if (files > 1) {
      send_file(serial * EVEN_BRING_FILES + 1, scratch_path("two"), "model.safetensors");
    }
    even_bring_take_close(take); /* the leader is gone */
    open_take();
    assert_true(is_there("one", &links));
    assert_false(is_there("two", &links));
    assert_false(is_there("two" EVEN_CHECKPOINT_PARTIAL, &links));
  }
  char *newest = NULL;
  assert_int_equal(even_checkpoint_find_newest(even_text_string(&kept.host->folder), true, &newest), EVEN_OK);
  assert_non_null(strstr(newest, "/one"));
  even_free(newest);
}

/* What both share is damaged there: the new one is refused, and the next comes whole. */
static void a_damaged_file_is_not_shared_for_ever(void **state) {
  char path[256];
  (void)state;
  bring_one();
  assert_int_equal(save_two(scratch_path("two"), 1, 3), EVEN_OK);
  (void)snprintf(path, sizeof path, "%s/one/model.safetensors", even_text_string(&kept.host->folder));
  FILE *file = fopen(path, "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, -1, SEEK_END), 0);
  assert_int_equal(fputc('x', file), 'x');
  assert_int_equal(fclose(file), 0);
  ask_memory(2, scratch_path("two"));
  send_file(2 * EVEN_BRING_FILES, scratch_path("two"), EVEN_CHECKPOINT_MANIFEST);
  send_file(2 * EVEN_BRING_FILES + 2, scratch_path("two"), "optimizer.safetensors");
  await_words(5);
  assert_non_null(strstr(said.data, "altered"));
  ask_memory(3, scratch_path("two"));
  send_file(3 * EVEN_BRING_FILES, scratch_path("two"), EVEN_CHECKPOINT_MANIFEST);
  send_file(3 * EVEN_BRING_FILES + 1, scratch_path("two"), "model.safetensors");
  send_file(3 * EVEN_BRING_FILES + 2, scratch_path("two"), "optimizer.safetensors");
  await_words(7);
  assert_non_null(strstr(said.data, "\"holds\":true"));
}

int main(void) {
#define TAKE_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      TAKE_TEST(the_one_before_goes_also_with_another_leader),
      TAKE_TEST(without_a_thread_it_ends_once),
      TAKE_TEST(what_came_is_known_to_the_next_agent),
      TAKE_TEST(what_could_not_be_named_is_not_kept),
      TAKE_TEST(what_nobody_wants_any_more_ends_early),
      TAKE_TEST(memory_has_the_newest_and_what_has_not_changed_is_not_sent),
      TAKE_TEST(a_torn_copy_leaves_the_one_before),
      TAKE_TEST(a_damaged_file_is_not_shared_for_ever),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
