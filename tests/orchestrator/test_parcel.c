/* Parcels between three agents in this process: whole or not there, whatever fails, and never in the way of others. */
#include "orchestrator/parcel.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/shared_memory.h"
#include "os/signals.h"
#include "parcel_star.h"
#include "support/clock_ahead.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { PIECE = EVEN_PARCEL_PIECE, ROOM = 2 << 20 };

static star at;

static int setup(void **state) {
  (void)state;
  return star_open(&at) == EVEN_OK ? 0 : 1;
}

static int teardown(void **state) {
  (void)state;
  star_close(&at);
  fault_reset();
  return 0;
}

static void send_well(int from, int to, uint64_t number, size_t bytes) {
  star_offer offer;
  int before = at.hosts[to].arrived;
  assert_int_equal(star_offer_test(&at, from, to, number, bytes, &offer), EVEN_OK);
  assert_int_equal(offer.told, 0);
  assert_int_equal(star_turn(&at, &offer.told, 1), EVEN_OK);
  assert_true(offer.received);
  assert_int_equal(at.hosts[to].arrived, before + 1);
  assert_false(at.hosts[to].altered);
  assert_int_equal(at.hosts[to].last.number, number);
  assert_int_equal(at.hosts[to].last.from, from);
  assert_int_equal(at.hosts[to].last.to, to);
  assert_int_equal(at.hosts[to].last.bytes, bytes);
}

static void expect_failure(star_offer *offer, even_status status, const char *words) {
  assert_int_equal(star_turn(&at, &offer->told, 1), EVEN_OK);
  assert_false(offer->received);
  assert_int_equal(offer->why.status, status);
  if (strstr(offer->why.what, words) == NULL) {
    fail_msg("\"%s\" is not in \"%s\"", words, offer->why.what);
  }
}

static void a_parcel_of_any_size_arrives_as_it_was(void **state) {
  static const size_t sizes[] = {1, 4095, PIECE - 1, PIECE, PIECE + 1, 9 * PIECE + 3};
  (void)state;
  int before = open_descriptors();
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    send_well(0, 1, 40 + i, sizes[i]); /* from the leader */
    send_well(2, 0, 50 + i, sizes[i]); /* to it */
    send_well(1, 2, 60 + i, sizes[i]); /* by it */
  }
  assert_int_equal(open_descriptors(), before);
}

static void many_at_once_take_turns(void **state) {
  enum { MANY = 7 };
  star_offer there[MANY];
  star_offer back[MANY];
  (void)state;
  for (uint64_t i = 0; i < MANY; i++) {
    assert_int_equal(star_offer_test(&at, 1, 2, i, 3 * PIECE, &there[i]), EVEN_OK);
    assert_int_equal(star_offer_test(&at, 2, 1, i, 2 * PIECE + 5, &back[i]), EVEN_OK);
  }
  for (int i = 0; i < MANY; i++) {
    assert_int_equal(star_turn(&at, &there[i].told, 1), EVEN_OK);
    assert_int_equal(star_turn(&at, &back[i].told, 1), EVEN_OK);
    assert_true(there[i].received && back[i].received);
  }
  for (int host = 1; host < STAR_HOSTS; host++) {
    assert_int_equal(at.hosts[host].arrived, MANY);
    assert_int_equal(at.hosts[host].most_underway, EVEN_PARCEL_AT_ONCE);
    assert_false(at.hosts[host].altered);
  }
}

/* Its receiver's agent stands still: nothing piles up on the way, others are not held up, and it is given up. */
static void who_takes_nothing_holds_up_nobody(void **state) {
  star_offer stuck;
  (void)state;
  assert_int_equal(star_offer_test(&at, 1, 2, 1, 64 * PIECE, &stuck), EVEN_OK);
  assert_int_equal(star_turn(&at, &at.hosts[2].underway, 1), EVEN_OK);
  star_freeze(&at, 2);
  star_rest(&at);
  assert_int_equal(stuck.told, 0);
  assert_true(at.hosts[2].pieces < 60);
  assert_true(at.most_waiting <= (size_t)EVEN_PARCEL_WINDOW + ROOM);
  send_well(1, 0, 2, 5 * PIECE);
  send_well(0, 1, 3, 5 * PIECE);
  assert_int_equal(stuck.told, 0);
  clock_ahead_set((STAR_PATIENCE_S + 1) * UINT64_C(1000000000));
  expect_failure(&stuck, EVEN_ERR_TIMEOUT, "host 2 takes nothing of parcel test");
  star_thaw(&at, 2);
  assert_int_equal(star_turn(&at, &at.hosts[2].failed, 1), EVEN_OK);
  assert_int_equal(at.hosts[2].why.status, EVEN_ERR_TIMEOUT);
  assert_int_equal(at.hosts[2].arrived, 0);
}

/* Its link's queue is never longer than a piece more than what is allowed. */
static void a_link_has_room_for_others_beside_it(void **state) {
  star_offer offers[4];
  (void)state;
  at.most_waiting = 0;
  for (uint64_t i = 0; i < 4; i++) {
    assert_int_equal(star_offer_test(&at, 0, 1 + (int)(i % 2), i, 24 * PIECE, &offers[i]), EVEN_OK);
  }
  for (int i = 0; i < 4; i++) {
    assert_int_equal(star_turn(&at, &offers[i].told, 1), EVEN_OK);
    assert_true(offers[i].received);
  }
  assert_true(at.most_waiting <= (size_t)ROOM + ROOM / 2);
}

static void both_ends_hear_of_a_host_that_is_lost(void **state) {
  star_offer to_it;
  star_offer from_it;
  (void)state;
  assert_int_equal(star_offer_test(&at, 1, 2, 1, 64 * PIECE, &to_it), EVEN_OK);
  assert_int_equal(star_offer_test(&at, 2, 1, 2, 64 * PIECE, &from_it), EVEN_OK);
  assert_int_equal(star_turn(&at, &at.hosts[2].underway, 1), EVEN_OK);
  assert_int_equal(star_turn(&at, &at.hosts[1].underway, 1), EVEN_OK);
  at.ends_expected = true;
  even_link_close(&at.hosts[0].ends[2].link);
  even_parcels_lost(at.hosts[0].parcels, 2);
  expect_failure(&to_it, EVEN_ERR_PEER_LOST, "host 2 is lost");
  assert_int_equal(star_turn(&at, &at.hosts[1].failed, 1), EVEN_OK);
  assert_int_equal(at.hosts[1].why.status, EVEN_ERR_PEER_LOST);
  assert_int_equal(star_turn(&at, &at.ended, 1), EVEN_OK); /* the other side of the link has seen it */
  assert_int_equal(at.hosts[2].failed, 1);
  assert_int_equal(from_it.told, 1);
  assert_int_equal(from_it.why.status, EVEN_ERR_PEER_LOST);
  star_offer late;
  assert_int_equal(star_offer_test(&at, 1, 2, 3, 100, &late), EVEN_OK); /* the leader says that there is no such host */
  expect_failure(&late, EVEN_ERR_PEER_LOST, "host 2 is lost");
  assert_int_equal(star_offer_test(&at, 0, 2, 3, 100, &late), EVEN_ERR_PEER_LOST);
  send_well(1, 0, 4, 3 * PIECE);
}

/* Both ways, of who takes them no more: the other ends hear of it, and nobody is called here. */
static void who_has_to_do_with_them_no_more_is_not_called(void **state) {
  star_offer to_it;
  star_offer from_it;
  star_offer later;
  (void)state;
  int before = open_descriptors();
  assert_int_equal(star_offer_test(&at, 1, 2, 1, 64 * PIECE, &to_it), EVEN_OK);
  assert_int_equal(star_offer_test(&at, 2, 1, 2, 64 * PIECE, &from_it), EVEN_OK);
  assert_int_equal(star_turn(&at, &at.hosts[2].underway, 1), EVEN_OK);
  assert_int_equal(star_turn(&at, &at.hosts[1].underway, 1), EVEN_OK);
  even_parcels_withdraw(at.hosts[2].parcels, "test");
  expect_failure(&to_it, EVEN_ERR_STATE, "nobody on host 2 has to do with parcels test any more");
  assert_int_equal(star_turn(&at, &at.hosts[1].failed, 1), EVEN_OK);
  assert_int_equal(at.hosts[1].why.status, EVEN_ERR_STATE);
  star_rest(&at);
  assert_int_equal(from_it.told, 0);
  assert_int_equal(at.hosts[2].failed, 0);
  assert_int_equal(open_descriptors(), before);
  assert_int_equal(star_offer_test(&at, 1, 2, 3, PIECE, &later), EVEN_OK);
  expect_failure(&later, EVEN_ERR_UNSUPPORTED, "nobody on host 2 takes a parcel test");
  even_parcels_withdraw(NULL, "test");
}

static void nothing(void *context, const even_parcel *parcel, const even_error *why) {
  (void)context;
  (void)parcel;
  (void)why;
  fail_msg("told of an offer that was none");
}

static void what_is_not_wanted_is_refused_with_its_words(void **state) {
  star_offer offer;
  int fd = -1;
  (void)state;
  int before = open_descriptors();
  at.hosts[2].refuses = EVEN_ERR_IN_USE;
  assert_int_equal(star_offer_test(&at, 1, 2, 1, PIECE, &offer), EVEN_OK);
  expect_failure(&offer, EVEN_ERR_IN_USE, "not now");
  assert_int_equal(at.hosts[2].failed + at.hosts[2].arrived, 0);
  at.hosts[2].refuses = EVEN_OK;
  at.hosts[2].dislikes = EVEN_ERR_CORRUPT;
  assert_int_equal(star_offer_test(&at, 1, 2, 1, PIECE, &offer), EVEN_OK);
  expect_failure(&offer, EVEN_ERR_CORRUPT, "not this one");
  assert_int_equal(at.hosts[2].arrived, 1);
  at.hosts[2].dislikes = EVEN_OK;
  at.hosts[2].alters = true;
  assert_int_equal(star_offer_test(&at, 0, 2, 1, 2 * PIECE, &offer), EVEN_OK);
  expect_failure(&offer, EVEN_ERR_CORRUPT, "its checksum is another one");
  assert_int_equal(at.hosts[2].failed, 1);
  for (int to = -1; to <= STAR_HOSTS; to += to == -1 ? 1 : STAR_HOSTS) { /* no host, this one, no host */
    assert_int_equal(star_memory(1, 10, &fd), EVEN_OK);
    assert_int_equal(even_parcels_offer(at.hosts[0].parcels, to, "test", 1, fd, 10, nothing, NULL), EVEN_ERR_ARGUMENT);
  }
  assert_int_equal(star_memory(1, 10, &fd), EVEN_OK);
  assert_int_equal(even_parcels_offer(at.hosts[0].parcels, 1, "test", 1, fd, 0, nothing, NULL), EVEN_ERR_ARGUMENT);
  assert_int_equal(open_descriptors(), before);
}

static void keep_error(void *context, const even_parcel *parcel, const even_error *why) {
  star_offer *offer = context;
  (void)parcel;
  offer->told++;
  offer->received = why == NULL;
  offer->why = why == NULL ? (even_error){.status = EVEN_OK} : *why;
}

/* Nothing is taken for a size that nobody has; a sender whose file is shorter than it says is found out. */
static void a_size_is_looked_at_before_memory_is_taken(void **state) {
  star_offer offer = {0};
  int fd = -1;
  (void)state;
  assert_int_equal(star_memory(1, 4096, &fd), EVEN_OK);
  assert_int_equal(even_parcels_offer(at.hosts[1].parcels, 2, "test", 1, fd, UINT64_C(1) << 60, keep_error, &offer),
                   EVEN_OK);
  expect_failure(&offer, EVEN_ERR_MEMORY, "parcel test needs 1152921504606846976 bytes of memory");
  assert_int_equal(at.hosts[2].failed, 1);
  offer = (star_offer){0};
  assert_int_equal(star_memory(1, 4096, &fd), EVEN_OK);
  assert_int_equal(even_parcels_offer(at.hosts[1].parcels, 2, "test", 1, fd, 3 * PIECE, keep_error, &offer), EVEN_OK);
  expect_failure(&offer, EVEN_ERR_CORRUPT, "ends too early");
  assert_int_equal(star_turn(&at, &at.hosts[2].failed, 2), EVEN_OK);
  offer = (star_offer){0};
  assert_int_equal(star_memory(1, 4096, &fd), EVEN_OK);
  assert_int_equal(even_parcels_offer(at.hosts[1].parcels, 2, "unknown", 1, fd, 4096, keep_error, &offer), EVEN_OK);
  expect_failure(&offer, EVEN_ERR_UNSUPPORTED, "nobody on host 2 takes a parcel unknown");
}

/* ---- what no right agent says ---- */

typedef struct garbage {
  even_message_kind kind;
  const char *json;
  const char *data;
  even_status status; /* that ends the link */
} garbage;

static void what_no_agent_says_ends_the_link_or_nothing(void **state) {
  static const garbage all[] = {
      {EVEN_MESSAGE_PARCEL, "", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "[]", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{}", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"test\",\"number\":1}", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":0}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":-4}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL,
       "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":9223372036854775808}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":1e300}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"\",\"number\":1,\"bytes\":5}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL,
       "{\"from\":0,\"to\":1,\"id\":1,\"name\":\"0123456789012345678901234567890123456789012345678901234567890123\","
       "\"number\":1,\"bytes\":5}",
       NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":0,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":5}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":3,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":5}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":-1,\"to\":1,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":5}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":1,\"id\":0,\"name\":\"test\",\"number\":1,\"bytes\":5}", NULL,
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL, "{\"from\":0,\"to\":2,\"id\":1,\"name\":\"test\",\"number\":1,\"bytes\":5}", NULL,
       EVEN_ERR_INPUT},                                                                            /* another host's */
      {EVEN_MESSAGE_PARCEL_TAKE, "{\"from\":0,\"to\":1,\"id\":1,\"at\":0}", NULL, EVEN_ERR_INPUT}, /* to host 0 */
      {EVEN_MESSAGE_PARCEL_TAKE, "{\"from\":1,\"to\":0,\"id\":1,\"at\":-1}", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL_TAKE, "{\"from\":1,\"to\":0,\"id\":7,\"at\":0}", NULL, EVEN_OK}, /* it was given up */
      {EVEN_MESSAGE_PIECE, "{\"from\":0,\"to\":1,\"id\":7,\"at\":0}", "abc", EVEN_OK},
      {EVEN_MESSAGE_PIECE, "{\"from\":0,\"to\":1,\"id\":7,\"at\":0,\"sum\":\"0123\"}", "abc", EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PIECE, "{\"from\":0,\"to\":1,\"id\":7,\"at\":0,\"sum\":\"0123456789ABCDEF\"}", "abc",
       EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL_END, "{\"from\":1,\"to\":0,\"id\":7,\"back\":true,\"status\":0}", NULL, EVEN_OK},
      {EVEN_MESSAGE_PARCEL_END, "{\"from\":1,\"to\":0,\"id\":7,\"back\":true,\"status\":4711}", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL_END, "{\"from\":1,\"to\":0,\"id\":7,\"back\":true}", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL_GONE, "{\"host\":3}", NULL, EVEN_ERR_INPUT},
      {EVEN_MESSAGE_PARCEL_GONE, "{\"host\":2}", NULL, EVEN_OK},
  };
  (void)state;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    const even_message message = {.kind = all[i].kind,
                                  .json = all[i].json,
                                  .json_bytes = strlen(all[i].json),
                                  .data = (const unsigned char *)all[i].data,
                                  .data_bytes = all[i].data == NULL ? 0 : strlen(all[i].data)};
    if (even_parcels_take(at.hosts[1].parcels, 0, &message) != all[i].status) {
      fail_msg("message %zu was not taken as it should be", i);
    }
  }
  const even_message gone = {.kind = EVEN_MESSAGE_PARCEL_GONE, .json = "{\"host\":2}", .json_bytes = 10};
  assert_int_equal(even_parcels_take(at.hosts[0].parcels, 1, &gone), EVEN_ERR_INPUT);
  star_rest(&at);
  assert_int_equal(at.hosts[1].arrived + at.hosts[1].failed, 0);
  send_well(0, 1, 1, PIECE);
}

typedef struct wrong_piece {
  const char *rest; /* of its JSON */
  size_t bytes;
} wrong_piece;

/* Of a parcel of 10 bytes, whose first 4 have come. */
static void pieces_that_do_not_follow_one_another_fail_it(void **state) {
  static const wrong_piece all[] = {
      {"\"at\":0", 4},                              /* again */
      {"\"at\":5", 3},                              /* a gap */
      {"\"at\":4", 0},                              /* nothing */
      {"\"at\":4", 7},                              /* too much */
      {"\"at\":4", 6},                              /* the last one, without a sum */
      {"\"at\":4,\"sum\":\"0123456789abcdef\"", 3}, /* a sum before its end */
      {"\"at\":4,\"sum\":\"0123456789abcdef\"", 6}, /* of other bytes */
      {"\"at\":9223372036854775807", 6},
  };
  static const unsigned char data[16] = "0123456789abcde";
  static const char offer[] = "{\"from\":0,\"to\":1,\"id\":9,\"name\":\"test\",\"number\":1,\"bytes\":10}";
  static const char first[] = "{\"from\":0,\"to\":1,\"id\":9,\"at\":0}";
  (void)state;
  int before = open_descriptors();
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    char json[128];
    const even_message messages[] = {
        {.kind = EVEN_MESSAGE_PARCEL, .json = offer, .json_bytes = sizeof offer - 1},
        {.kind = EVEN_MESSAGE_PIECE, .json = first, .json_bytes = sizeof first - 1, .data = data, .data_bytes = 4},
    };
    for (size_t m = 0; m < 2; m++) {
      assert_int_equal(even_parcels_take(at.hosts[1].parcels, 0, &messages[m]), EVEN_OK);
    }
    assert_int_equal(at.hosts[1].underway, 1);
    int length = snprintf(json, sizeof json, "{\"from\":0,\"to\":1,\"id\":9,%s}", all[i].rest);
    const even_message wrong = {.kind = EVEN_MESSAGE_PIECE,
                                .json = json,
                                .json_bytes = (size_t)length,
                                .data = data,
                                .data_bytes = all[i].bytes};
    assert_int_equal(even_parcels_take(at.hosts[1].parcels, 0, &wrong), EVEN_OK);
    if (at.hosts[1].failed != (int)i + 1) {
      fail_msg("piece %zu was taken", i);
    }
  }
  assert_int_equal(at.hosts[1].arrived, 0);
  assert_int_equal(open_descriptors(), before);
}

static void more_than_may_wait_are_refused(void **state) {
  (void)state;
  for (int i = 1; i <= EVEN_PARCEL_QUEUED + 10; i++) {
    char json[128];
    int length =
        snprintf(json, sizeof json, "{\"from\":0,\"to\":1,\"id\":%d,\"name\":\"test\",\"number\":1,\"bytes\":10}", i);
    const even_message message = {.kind = EVEN_MESSAGE_PARCEL, .json = json, .json_bytes = (size_t)length};
    assert_int_equal(even_parcels_take(at.hosts[1].parcels, 0, &message), EVEN_OK);
  }
  assert_int_equal(at.hosts[1].underway, EVEN_PARCEL_AT_ONCE);
  star_rest(&at); /* the leader says of each that it does not offer it */
  assert_int_equal(at.hosts[1].underway, 0);
  assert_int_equal(at.hosts[1].failed, EVEN_PARCEL_QUEUED);
}

/* ---- faults ---- */

/* From one host to the other by the leader, everything with it. Each end is told once, and of nothing that is not. */
static even_status carry(void *context) {
  star_offer offer = {0};
  (void)context;
  even_status status = star_open(&at);
  if (status == EVEN_OK) {
    status = star_offer_test(&at, 1, 2, 5, PIECE + 100, &offer);
  }
  bool offered = status == EVEN_OK;
  if (offered) {
    status = star_turn(&at, &offer.told, 1);
  }
  if (status == EVEN_OK && !offer.received) {
    status = offer.why.status;
  }
  star_close(&at);
  if (offer.told > 1 || at.hosts[2].altered || (offer.received && at.hosts[2].arrived != 1) ||
      at.hosts[2].arrived + at.hosts[2].failed > 1) {
    fail_msg("told %d times, received %d, arrived %d, failed %d", offer.told, offer.received, at.hosts[2].arrived,
             at.hosts[2].failed);
  }
  return status;
}

/* What could not be said for lack of memory, patience ends. */
static even_status carry_without_memory(void *context) {
  even_status status = carry(context);
  return status == EVEN_ERR_TIMEOUT ? EVEN_ERR_MEMORY : status;
}

static void each_fault_of_the_kernel_fails_it_or_nothing(void **state) {
  (void)state;
  int before = open_descriptors();
  assert_true(fault_each_os(carry, NULL, EIO) > 30);
  assert_int_equal(open_descriptors(), before);
}

static void each_lack_of_memory_fails_it(void **state) {
  (void)state;
  int before = open_descriptors();
  assert_true(fault_each_allocation(carry_without_memory, NULL) > 20);
  assert_int_equal(open_descriptors(), before);
}

/* ---- how fast ---- */

static void three_hundred_megabytes_go_through(void **state) {
  enum { MOST = 300000000, FEW = 30000000 };
  size_t bytes = getenv("EVENSTEP_TEST_MORE") != NULL ? MOST : FEW;
  (void)state;
  at.unread = true;
  for (int from = 0; from < 2; from++) {
    star_offer offer;
    assert_int_equal(star_offer_test(&at, from, 2, 8, bytes, &offer), EVEN_OK);
    uint64_t begun = even_clock_ns();
    clock_t used = clock();
    assert_int_equal(star_turn(&at, &offer.told, 1), EVEN_OK);
    assert_true(offer.received);
    double seconds = (double)(even_clock_ns() - begun) / 1e9;
    double processor = (double)(clock() - used) / CLOCKS_PER_SEC;
    print_message("%zu bytes %s: %.0f MB/s, %.0f by the processor's time\n", bytes,
                  from == 0 ? "from the leader" : "by the leader", (double)bytes / 1e6 / seconds,
                  (double)bytes / 1e6 / processor);
  }
}

int main(void) {
  struct sigaction pipe_before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_parcel_of_any_size_arrives_as_it_was, setup, teardown),
      cmocka_unit_test_setup_teardown(many_at_once_take_turns, setup, teardown),
      cmocka_unit_test_setup_teardown(who_takes_nothing_holds_up_nobody, setup, teardown),
      cmocka_unit_test_setup_teardown(a_link_has_room_for_others_beside_it, setup, teardown),
      cmocka_unit_test_setup_teardown(both_ends_hear_of_a_host_that_is_lost, setup, teardown),
      cmocka_unit_test_setup_teardown(who_has_to_do_with_them_no_more_is_not_called, setup, teardown),
      cmocka_unit_test_setup_teardown(what_is_not_wanted_is_refused_with_its_words, setup, teardown),
      cmocka_unit_test_setup_teardown(a_size_is_looked_at_before_memory_is_taken, setup, teardown),
      cmocka_unit_test_setup_teardown(what_no_agent_says_ends_the_link_or_nothing, setup, teardown),
      cmocka_unit_test_setup_teardown(pieces_that_do_not_follow_one_another_fail_it, setup, teardown),
      cmocka_unit_test_setup_teardown(more_than_may_wait_are_refused, setup, teardown),
      cmocka_unit_test(each_fault_of_the_kernel_fails_it_or_nothing),
      cmocka_unit_test(each_lack_of_memory_fails_it),
      cmocka_unit_test_setup_teardown(three_hundred_megabytes_go_through, setup, teardown),
  };
  if (even_signals_pipe_ignore(&pipe_before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
