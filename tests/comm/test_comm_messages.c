/* Messages between two ranks: order, tags, sizes, the background, and what ends them. */
#include "base/alloc.h"
#include "base/fail.h"
#include "comm/messages.h"
#include "comm/ranks.h"
#include "comm/steps.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define LARGE ((size_t)3 << 20) /* more than any ring holds */

static const ranks_setup two = {.ranks = 2, .timeout_seconds = 60, .spin = -1};
static const ranks_setup three = {.ranks = 3, .timeout_seconds = 60, .spin = -1};

static even_status send_now(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag) {
  even_comm_request *request = NULL;
  even_status status = even_comm_send_begin(comm, data, bytes, peer, tag, &request);
  status = status == EVEN_OK ? even_comm_request_wait(request, 0, NULL) : status;
  even_comm_request_free(request);
  return status;
}

static even_status receive_now(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag, int *from) {
  even_comm_request *request = NULL;
  even_status status = even_comm_receive_begin(comm, data, bytes, peer, tag, &request);
  status = status == EVEN_OK ? even_comm_request_wait(request, 0, from) : status;
  even_comm_request_free(request);
  return status;
}

static unsigned char content(size_t number, size_t index) {
  return (unsigned char)(number * 131 + index * 7 + index / 251);
}
static unsigned char *filled(size_t number, size_t bytes) {
  unsigned char *data = malloc(bytes + 1);
  for (size_t i = 0; i < bytes; i++) {
    data[i] = content(number, i);
  }
  return data;
}
static bool holds(const unsigned char *data, size_t number, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    if (data[i] != content(number, i)) {
      return false;
    }
  }
  return true;
}

static void on_both(const ranks_setup *setup, ranks_body *body, void *argument) {
  ranks_setup threads = *setup;
  threads.threads = true;
  assert_int_equal(ranks_run(setup, body, argument, NULL), 0);
  assert_int_equal(ranks_run(&threads, body, argument, NULL), 0);
}

/* ---- what arrives ---- */

static int there_and_back(even_comm *comm, void *argument) {
  static const size_t sizes[] = {0, 1, 15, 16, 17, 4096, 65536, 65537, 262144, 1000003};
  (void)argument;
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    unsigned char *data = even_comm_rank(comm) == 0 ? filled(i, sizes[i]) : calloc(1, sizes[i] + 1);
    int peer = 1 - even_comm_rank(comm);
    int from = -7;
    if (even_comm_rank(comm) == 0) {
      RANKS_EXPECT(comm, send_now(comm, data, sizes[i], peer, i) == EVEN_OK);
      memset(data, 0, sizes[i]);
      RANKS_EXPECT(comm, receive_now(comm, data, sizes[i], peer, i, &from) == EVEN_OK);
    } else {
      RANKS_EXPECT(comm, receive_now(comm, data, sizes[i], peer, i, &from) == EVEN_OK);
      RANKS_EXPECT(comm, send_now(comm, data, sizes[i], peer, i) == EVEN_OK);
    }
    RANKS_EXPECT(comm, holds(data, i, sizes[i]) && from == peer);
    free(data);
  }
  return 0;
}

static void test_there_and_back(void **state) {
  ranks_setup sleeping = two;
  sleeping.spin = 0;
  (void)state;
  on_both(&two, there_and_back, NULL);
  on_both(&sleeping, there_and_back, NULL);
}

static int out_of_order(even_comm *comm, void *argument) {
  static const size_t sizes[] = {LARGE, 8, 100000, 0, 8};
  static const uint64_t tags[] = {3, 1, 3, 2, 1};
  static const int order[] = {1, 3, 0, 4, 2}; /* of one tag in the order of sending, else any */
  even_comm_request *requests[5];
  unsigned char *data[5];
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    for (size_t i = 0; i < 5; i++) {
      data[i] = filled(i, sizes[i]);
      RANKS_EXPECT(comm, even_comm_send_begin(comm, data[i], sizes[i], 1, tags[i], &requests[i]) == EVEN_OK);
    }
    for (size_t i = 5; i-- > 0;) {
      RANKS_EXPECT(comm, even_comm_request_wait(requests[i], 0, NULL) == EVEN_OK);
      even_comm_request_free(requests[i]);
      free(data[i]);
    }
    return 0;
  }
  for (size_t i = 0; i < 5; i++) {
    size_t number = (size_t)order[i];
    data[0] = calloc(1, sizes[number] + 1);
    RANKS_EXPECT(comm, receive_now(comm, data[0], sizes[number], 0, tags[number], NULL) == EVEN_OK);
    RANKS_EXPECT(comm, holds(data[0], number, sizes[number]));
    free(data[0]);
  }
  return 0;
}

static void test_tags_choose_and_order_is_kept(void **state) {
  (void)state;
  on_both(&two, out_of_order, NULL);
}

static int from_any(even_comm *comm, void *argument) {
  size_t rank = (size_t)even_comm_rank(comm);
  bool seen[3] = {true, false, false};
  (void)argument;
  if (rank != 0) {
    unsigned char *data = filled(rank, 5000);
    RANKS_EXPECT(comm, send_now(comm, data, 5000, 0, 9) == EVEN_OK);
    free(data);
    return 0; /* it closes the group: the other may still come */
  }
  for (int i = 0; i < 2; i++) {
    unsigned char data[5000];
    int from = -1;
    RANKS_EXPECT(comm, receive_now(comm, data, sizeof data, EVEN_COMM_ANY_RANK, 9, &from) == EVEN_OK);
    RANKS_EXPECT(comm, from > 0 && from < 3 && !seen[from] && holds(data, (size_t)from, sizeof data));
    seen[from] = true;
  }
  RANKS_EXPECT(comm, receive_now(comm, seen, 1, EVEN_COMM_ANY_RANK, 9, NULL) == EVEN_ERR_PEER_LOST);
  return 0;
}

static void test_from_any_rank(void **state) {
  (void)state;
  on_both(&three, from_any, NULL);
}

/* All to all and to themselves at once, everything begun before anything is awaited. */
static int crossing(even_comm *comm, void *argument) {
  even_comm_request *requests[6];
  unsigned char *data[6];
  int ranks = even_comm_ranks(comm);
  size_t own = (size_t)even_comm_rank(comm);
  (void)argument;
  for (int peer = 0; peer < ranks; peer++) {
    data[peer] = filled(own * 10 + (size_t)peer, LARGE);
    data[3 + peer] = calloc(1, LARGE);
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data[peer], LARGE, peer, 0, &requests[peer]) == EVEN_OK);
  }
  for (int peer = 0; peer < ranks; peer++) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, data[3 + peer], LARGE, peer, 0, &requests[3 + peer]) == EVEN_OK);
  }
  for (size_t i = 0; i < 6; i++) {
    RANKS_EXPECT(comm, even_comm_request_wait(requests[i], 1e30, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_done(requests[i]));
    even_comm_request_free(requests[i]);
    RANKS_EXPECT(comm, i < 3 || holds(data[i], (i - 3) * 10 + own, LARGE));
    free(data[i]);
  }
  return 0;
}

static void test_crossing(void **state) {
  (void)state;
  on_both(&three, crossing, NULL);
}

/* A long message goes on its way though nobody on the sender's side waits for it. */
static int in_background(even_comm *comm, void *argument) {
  char word = 0;
  even_comm_request *request = NULL;
  unsigned char *data = filled(4, LARGE);
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, LARGE, 1, 0, &request) == EVEN_OK);
    while (atomic_load(&comm->controls[1].left) == 0) { /* nothing is called meanwhile */
    }
    RANKS_EXPECT(comm, even_comm_request_done(request));
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, receive_now(comm, &word, 1, 1, 1, NULL) == EVEN_OK && word == 'w'); /* sent before it left */
    RANKS_EXPECT(comm, receive_now(comm, &word, 1, 1, 1, NULL) == EVEN_ERR_PEER_LOST);
    RANKS_EXPECT(comm,
                 even_error_last()->rank == 1 && strstr(even_error_last()->what, "receive of 1 bytes from rank 1"));
    even_comm_request_free(request);
  } else {
    memset(data, 0, LARGE);
    RANKS_EXPECT(comm, receive_now(comm, data, LARGE, 0, 0, NULL) == EVEN_OK && holds(data, 4, LARGE));
    word = 'w';
    RANKS_EXPECT(comm, send_now(comm, &word, 1, 0, 1) == EVEN_OK);
  }
  free(data);
  return 0;
}

static void test_in_the_background(void **state) {
  (void)state;
  on_both(&two, in_background, NULL);
}

static void *meet(void *argument) {
  static even_status status;
  status = even_comm_barrier(argument);
  return &status;
}

static int beside_a_collective(even_comm *comm, void *argument) {
  char word = 'x';
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    pthread_t thread;
    void *result = NULL;
    RANKS_EXPECT(comm, pthread_create(&thread, NULL, meet, comm) == 0);
    while (atomic_load(&comm->controls[0].sequence) == 1) { /* until it is in the barrier */
    }
    RANKS_EXPECT(comm, send_now(comm, &word, 1, 1, 0) == EVEN_OK);
    RANKS_EXPECT(comm, pthread_join(thread, &result) == 0 && *(even_status *)result == EVEN_OK);
    return 0;
  }
  RANKS_EXPECT(comm, receive_now(comm, &word, 1, 0, 0, NULL) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static void test_beside_a_collective(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&two, beside_a_collective, NULL, NULL), 0);
}

/* ---- any order ---- */

#define RANDOM_MESSAGES 12 /* from each rank to each */
#define RANDOM_TAGS 3

static uint64_t scramble(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t hash = seed + a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  return hash ^ (hash >> 27);
}

typedef struct random_message {
  int from;
  int to;
  int number;
  uint64_t tag;
  size_t bytes;
  uint64_t turn; /* messages are begun in this order */
  unsigned char *data;
  even_comm_request *request;
} random_message;

static size_t number_of(const random_message *message) {
  return (size_t)(message->from * 10007 + message->to * 101 + message->number);
}

static int earlier(const void *a, const void *b) {
  const random_message *one = a;
  const random_message *other = b;
  return one->turn < other->turn ? -1 : one->turn > other->turn;
}

/* Turns that grow with the number within one pair and tag, and are mixed otherwise: sorting by them keeps both. */
static void plan_messages(random_message *messages, int ranks, uint64_t seed, bool receiving) {
  for (int from = 0, at = 0; from < ranks; from++) {
    for (int to = 0; to < ranks; to++) {
      uint64_t turn[RANDOM_TAGS] = {0};
      for (int number = 0; number < RANDOM_MESSAGES; number++, at++) {
        uint64_t random = scramble(seed, (uint64_t)from, (uint64_t)to, (uint64_t)number);
        uint64_t tag = random % RANDOM_TAGS;
        turn[tag] += (scramble(random, receiving, 3, 4) % 1000 + 1) << 16; /* and no two alike: */
        size_t most = random / 64 % 4 == 0 ? 400000 : 3000;
        messages[at] = (random_message){.from = from,
                                        .to = to,
                                        .number = number,
                                        .tag = tag,
                                        .bytes = random / 1024 % most,
                                        .turn = turn[tag] + (uint64_t)at};
      }
    }
  }
}

static int any_order(even_comm *comm, void *argument) {
  static const int most = 3 * 3 * RANDOM_MESSAGES;
  uint64_t seed = *(uint64_t *)argument;
  int own = even_comm_rank(comm);
  int count = even_comm_ranks(comm) * even_comm_ranks(comm) * RANDOM_MESSAGES;
  random_message *sends = calloc((size_t)most * 2, sizeof *sends);
  random_message *receives = sends + most;
  plan_messages(sends, even_comm_ranks(comm), seed, false);
  plan_messages(receives, even_comm_ranks(comm), seed, true);
  qsort(sends, (size_t)count, sizeof *sends, earlier);
  qsort(receives, (size_t)count, sizeof *receives, earlier);
  for (int i = 0; i < count; i++) {
    random_message *out = &sends[i];
    random_message *in = &receives[i];
    if (out->from == own) {
      out->data = filled(number_of(out), out->bytes);
      RANKS_EXPECT(comm,
                   even_comm_send_begin(comm, out->data, out->bytes, out->to, out->tag, &out->request) == EVEN_OK);
    }
    if (in->to == own) {
      in->data = calloc(1, in->bytes + 1);
      RANKS_EXPECT(comm,
                   even_comm_receive_begin(comm, in->data, in->bytes, in->from, in->tag, &in->request) == EVEN_OK);
    }
  }
  for (int i = count; i-- > 0;) {
    random_message *message = seed % 2 == 0 ? &receives[i] : &receives[count - 1 - i];
    if (message->to == own) {
      RANKS_EXPECT(comm, even_comm_request_wait(message->request, 0, NULL) == EVEN_OK);
      RANKS_EXPECT(comm, holds(message->data, number_of(message), message->bytes));
    }
  }
  for (int i = 0; i < 2 * most; i++) {
    if (sends[i].request != NULL) {
      RANKS_EXPECT(comm, even_comm_request_wait(sends[i].request, 0, NULL) == EVEN_OK);
      even_comm_request_free(sends[i].request);
      free(sends[i].data);
    }
  }
  free(sends);
  return 0;
}

static void test_any_order(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 12; seed++) {
    ranks_setup setup = seed % 3 == 0 ? two : three;
    setup.threads = seed % 4 == 1;
    setup.spin = seed % 5 == 2 ? 0 : -1;
    assert_int_equal(ranks_run(&setup, any_order, &seed, NULL), 0);
  }
}

/* ---- what ends ---- */

static int peer_dies(even_comm *comm, void *argument) {
  bool receives = *(int *)argument == 0;
  unsigned char *data = filled(1, LARGE);
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, receive_now(comm, data, 4, 0, 5, NULL) == EVEN_OK);
    (void)raise(SIGKILL);
  }
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, send_now(comm, data, 4, 1, 5) == EVEN_OK);
  }
  even_status status = receives ? receive_now(comm, data, 8, 1, 0, NULL) : send_now(comm, data, LARGE, 1, 0);
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, send_now(comm, data, 4, 1, 0) == EVEN_ERR_PEER_LOST);
  free(data);
  return 0;
}

static void test_death_of_a_peer(void **state) {
  (void)state;
  for (int way = 0; way < 2; way++) {
    int results[RANKS_MOST];
    (void)ranks_run(&three, peer_dies, &way, results);
    assert_int_equal(results[0], 0);
    assert_int_equal(results[1], RANKS_KILLED);
    assert_int_equal(results[2], 0);
  }
}

static int be_revoked(even_comm *comm, void *argument) {
  char word = 0;
  even_comm_request *request = NULL;
  (void)argument;
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 1, EVEN_COMM_ANY_RANK, 0, &request) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, receive_now(comm, &word, 1, 0, 3, NULL) == EVEN_OK);
    even_comm_revoke(comm);
  } else {
    RANKS_EXPECT(comm, send_now(comm, &word, 1, 1, 3) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_ERR_REVOKED);
  even_comm_request_free(request);
  RANKS_EXPECT(comm, receive_now(comm, &word, 1, 0, 0, NULL) == EVEN_ERR_REVOKED);
  return 0;
}

static void test_revoke(void **state) {
  (void)state;
  on_both(&two, be_revoked, NULL);
}

static int be_late(even_comm *comm, void *argument) {
  char word = 0;
  even_comm_request *request = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 1, 1, 77, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0.05, NULL) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(comm, strstr(even_error_last()->what, "receive of 1 bytes from rank 1 with tag 77") != NULL);
    even_comm_request_free(request);
  } else {
    RANKS_EXPECT(comm, receive_now(comm, &word, 1, 0, 0, NULL) == EVEN_ERR_TIMEOUT);
  }
  return 0;
}

static void test_timeout(void **state) {
  (void)state;
  on_both(&two, be_late, NULL);
}

static int wrong_size(even_comm *comm, void *argument) {
  char words[8] = "1234567";
  char more[16];
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, send_now(comm, words, 8, 1, 0) == EVEN_OK);
    RANKS_EXPECT(comm, send_now(comm, words, 1, 1, 1) == EVEN_OK);
    steps_reach(argument, 1);
    steps_await(argument, 2); /* in a call it would be told */
    return even_comm_barrier(comm) != EVEN_OK;
  }
  steps_await(argument, 1);
  RANKS_EXPECT(comm, receive_now(comm, words, 4, 0, 0, NULL) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "rank 0 sent 8 bytes with tag 0, but rank 1 receives 4") != NULL);
  RANKS_EXPECT(comm, receive_now(comm, words, 1, 0, 1, NULL) == EVEN_OK); /* the other is kept meanwhile */
  RANKS_EXPECT(comm, receive_now(comm, words, 4, 0, 0, NULL) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, receive_now(comm, more, sizeof more, 0, 0, NULL) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, receive_now(comm, words, 8, 0, 0, NULL) == EVEN_OK && strcmp(words, "1234567") == 0);
  steps_reach(argument, 2);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void test_wrong_size(void **state) {
  ranks_setup threads = two;
  threads.threads = true;
  steps *step = steps_make();
  (void)state;
  assert_non_null(step);
  assert_int_equal(ranks_run(&two, wrong_size, step, NULL), 0);
  atomic_store(step, 0);
  assert_int_equal(ranks_run(&threads, wrong_size, step, NULL), 0);
  steps_free(step);
}

static int give_up(even_comm *comm, void *argument) {
  unsigned char *data = filled(1, LARGE);
  even_comm_request *request = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, data, 1, 1, 0, &request) == EVEN_OK);
    even_comm_request_free(request); /* nothing of it had come: no harm done */
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, LARGE, 1, 0, &request) == EVEN_OK);
    even_comm_request_free(request); /* a part of it has gone */
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  } else {
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
    while (atomic_load(&comm->header->state) == EVEN_GROUP_WHOLE) { /* takes nothing of it */
    }
    RANKS_EXPECT(comm, receive_now(comm, data, LARGE, 0, 0, NULL) == EVEN_ERR_REVOKED);
  }
  free(data);
  return 0;
}

static void test_giving_up(void **state) {
  (void)state;
  on_both(&two, give_up, NULL);
}

/* ---- bad arguments, no memory ---- */

static void test_bad_arguments(void **state) {
  even_comm *comm = ranks_open_alone(0);
  char word = 0;
  (void)state;
  assert_int_equal(send_now(comm, &word, 1, 1, 0), EVEN_ERR_ARGUMENT);
  assert_int_equal(send_now(comm, &word, 1, EVEN_COMM_ANY_RANK, 0), EVEN_ERR_ARGUMENT);
  assert_int_equal(send_now(comm, NULL, 1, 0, 0), EVEN_ERR_ARGUMENT);
  assert_int_equal(receive_now(comm, &word, 1, -2, 0, NULL), EVEN_ERR_ARGUMENT);
  even_comm_request_free(NULL);
  size_t ring = comm->layout.ring_bytes;
  assert_true(even_comm_has_messages(comm));
  comm->layout.ring_bytes = 0; /* as in a group of more than EVEN_COMM_MESSAGE_RANKS */
  assert_int_equal(send_now(comm, &word, 1, 0, 0), EVEN_ERR_UNSUPPORTED);
  assert_false(even_comm_has_messages(comm));
  comm->layout.ring_bytes = ring;
  even_comm_request *request = NULL;
  assert_int_equal(even_comm_receive_begin(comm, &word, 1, 0, 0, &request), EVEN_OK);
  even_comm_leave(comm);
  assert_int_equal(even_comm_request_wait(request, 0, NULL), EVEN_ERR_STATE);
  assert_non_null(strstr(even_error_last()->what, "rank 0 left the group before its receive of 1 bytes from rank 0"));
  even_comm_request_free(request);
  assert_int_equal(send_now(comm, &word, 1, 0, 0), EVEN_ERR_STATE);
  even_comm_close(comm);
}

/* A message is kept for later while another is received: requests and the keeping take memory. */
static even_status send_to_oneself(void *context) {
  even_comm *comm = context;
  char words[4] = "abc";
  even_status status = send_now(comm, words, 4, 0, 1);
  status = status == EVEN_OK ? send_now(comm, words + 1, 2, 0, 2) : status;
  status = status == EVEN_OK ? receive_now(comm, words, 2, 0, 2, NULL) : status;
  even_status drained = status == EVEN_OK ? EVEN_OK : status;
  return drained == EVEN_OK ? receive_now(comm, words, 4, 0, 1, NULL) : drained;
}

static even_status open_and_send(void *context) {
  even_comm_params params = {.size = sizeof params, .ranks = 1, .timeout_seconds = 60};
  even_comm *comm = NULL;
  int fd = *(int *)context;
  even_status status = even_comm_open(&params, fd, &comm);
  if (status == EVEN_OK) {
    comm->controls[0].process = 0; /* so that it can be opened once more */
    status = send_to_oneself(comm);
    atomic_store(&comm->header->state, EVEN_GROUP_WHOLE);
    even_comm_channel *channel = even_comm_channel_of(comm, 0, 0);
    atomic_store(&channel->read, atomic_load(&channel->written)); /* what was left by the failure */
  }
  even_error failure = *even_error_last();
  even_comm_close(comm);
  return status == EVEN_OK ? EVEN_OK : even_error_restore(&failure);
}

static even_status with_a_new_segment(void *context) {
  even_comm_params params = {.size = sizeof params, .ranks = 1};
  int fd = -1;
  (void)context;
  EVEN_TRY(even_comm_create_segment(&params, &fd));
  even_status status = open_and_send(&fd);
  (void)close(fd);
  return status;
}

static void test_without_memory(void **state) {
  (void)state;
  assert_true(fault_each_allocation(with_a_new_segment, NULL) >= 8);
}

static int large_without_thread(even_comm *comm, void *argument) {
  unsigned char *data = filled(1, LARGE);
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    even_comm_request *request = NULL;
    fault_os(FAULT_thread_create, 1, EAGAIN);
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, LARGE, 1, 0, &request) == EVEN_OK);
    fault_reset();
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_OK); /* moved by who waits */
    even_comm_request_free(request);
  } else {
    memset(data, 0, LARGE);
    RANKS_EXPECT(comm, receive_now(comm, data, LARGE, 0, 0, NULL) == EVEN_OK && holds(data, 1, LARGE));
  }
  free(data);
  return 0;
}

static void test_without_a_thread(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&two, large_without_thread, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_there_and_back),
      cmocka_unit_test(test_tags_choose_and_order_is_kept),
      cmocka_unit_test(test_from_any_rank),
      cmocka_unit_test(test_crossing),
      cmocka_unit_test(test_in_the_background),
      cmocka_unit_test(test_beside_a_collective),
      cmocka_unit_test(test_any_order),
      cmocka_unit_test(test_death_of_a_peer),
      cmocka_unit_test(test_revoke),
      cmocka_unit_test(test_timeout),
      cmocka_unit_test(test_wrong_size),
      cmocka_unit_test(test_giving_up),
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_without_memory),
      cmocka_unit_test(test_without_a_thread),
  };
  return cmocka_run_group_tests_name("messages between ranks", tests, NULL, NULL);
}
