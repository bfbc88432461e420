/* Checkpoints that come to a host, by real parcels over loopback: each is there once, whole, or not at all, whatever
 * becomes of the thread that compares it, and of the leader that sent it. */
#include "orchestrator/bring.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
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
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { MOST = 1 << 20 };

static const double patience_s = 120;

static star at;
static even_bring_take *take;
static even_text before;
static even_text said; /* the last words to the leader */
static int told;

static void tell(void *context, even_text *text) {
  (void)context;
  even_text_free(&said);
  said = *text;
  told++;
}

static void open_take(void) {
  told = 0;
  assert_int_equal(even_bring_take_open(at.hosts[1].parcels, &before, tell, NULL, &take), EVEN_OK);
}

static int set_up(void **state) {
  before = (even_text)EVEN_TEXT_EMPTY;
  take = NULL;
  return scratch_make(state) == 0 && star_open(&at) == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  even_bring_take_close(take);
  star_close(&at);
  even_text_free(&before);
  even_text_free(&said);
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
  assert_string_equal(even_text_string(&before), scratch_path("there/two"));
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
  assert_int_equal(before.length, 0);
}

int main(void) {
#define TAKE_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      TAKE_TEST(the_one_before_goes_also_with_another_leader),
      TAKE_TEST(without_a_thread_it_ends_once),
      TAKE_TEST(what_nobody_wants_any_more_ends_early),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
