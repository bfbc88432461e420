/* Ranks that mean different things, on every engine: messages, and parts of all-to-alls, of as many bytes but of
 * another dtype, and parts of other sizes. */
#include "comm/called.h"
#include "comm/ranks.h"
#include "comm/steps.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define RANKS 3
#define LARGE ((size_t)1 << 20) /* more than travels with the words of a call, and than a ring takes */

#define F32 EVEN_CALLED_DTYPE(EVEN_F32)
#define I32 EVEN_CALLED_DTYPE(EVEN_I32)
#define I64 EVEN_CALLED_DTYPE(EVEN_I64)
#define U8 EVEN_CALLED_DTYPE(EVEN_U8)
#define NOT_SAID 0

static const int HOST_OF[RANKS] = {0, 0, 1};

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

/* ---- messages ---- */

static even_comm_request *begin_as(even_comm *comm, uint32_t elements, void *data, size_t bytes, int peer, uint64_t tag,
                                   bool sends) {
  const even_comm_called called = {.elements = elements};
  even_comm_request *request = NULL;
  even_comm_call_as(&called);
  even_status status = sends ? even_comm_send_begin(comm, data, bytes, peer, tag, &request)
                             : even_comm_receive_begin(comm, data, bytes, peer, tag, &request);
  return status == EVEN_OK ? request : NULL;
}

static even_status end(even_comm_request *request, int *peer) {
  even_status status = request == NULL ? even_error_last()->status : even_comm_request_wait(request, 0, peer);
  even_comm_request_free(request);
  return status;
}

static even_status send_as(even_comm *comm, uint32_t elements, void *data, size_t bytes, int to, uint64_t tag) {
  return end(begin_as(comm, elements, data, bytes, to, tag, true), NULL);
}

static even_status receive_as(even_comm *comm, uint32_t elements, void *data, size_t bytes, int from, uint64_t tag) {
  return end(begin_as(comm, elements, data, bytes, from, tag, false), NULL);
}

/* While a rank tries what does not fit, and then receives it, its sender is in no call: it would be told. */
static int send_all(even_comm *comm, unsigned char *data, steps *step) {
  RANKS_EXPECT(comm, send_as(comm, F32, memcpy(data, "\1\2\3", 4), 4, 1, 1) == EVEN_OK);
  RANKS_EXPECT(comm, send_as(comm, I32, data, 4, 1, 2) == EVEN_OK);
  RANKS_EXPECT(comm, send_as(comm, U8, data, 4, 1, 3) == EVEN_OK);
  RANKS_EXPECT(comm, send_as(comm, F32, data, 4, 1, 4) == EVEN_OK);
  RANKS_EXPECT(comm, send_as(comm, NOT_SAID, data, 4, 1, 5) == EVEN_OK);
  RANKS_EXPECT(comm, send_as(comm, F32, data, 0, 1, 6) == EVEN_OK);
  steps_reach(step, 1);
  steps_await(step, 2);
  RANKS_EXPECT(comm, receive_as(comm, NOT_SAID, data, 1, 1, 7) == EVEN_OK); /* the receiver waits for the next one */
  RANKS_EXPECT(comm, send_as(comm, F32, data, 4, 1, 8) == EVEN_OK);
  even_comm_request *large = begin_as(comm, F32, data, LARGE, 1, 9, true);
  steps_reach(step, 3);
  steps_await(step, 4);
  RANKS_EXPECT(comm, end(large, NULL) == EVEN_OK);
  return 0;
}

static int receive_all(even_comm *comm, unsigned char *data, steps *step) {
  int peer = -1;
  steps_await(step, 1);
  RANKS_EXPECT(comm, receive_as(comm, I32, data, 4, 0, 2) == EVEN_OK); /* the one before is there, and kept */
  RANKS_EXPECT(comm, receive_as(comm, I32, data, 4, 0, 1) == EVEN_ERR_MISMATCH && even_error_last()->rank == 0);
  RANKS_EXPECT(comm, mentions("sent 4 bytes of F32 with tag 1, but rank 1 receives 4 of I32"));
  RANKS_EXPECT(comm, receive_as(comm, F32, data, 4, 0, 1) == EVEN_OK && memcmp(data, "\1\2\3", 4) == 0);
  RANKS_EXPECT(comm, receive_as(comm, F32, data, 4, 0, 3) == EVEN_OK); /* bytes are what the other says */
  RANKS_EXPECT(comm, receive_as(comm, U8, data, 4, 0, 4) == EVEN_OK);
  RANKS_EXPECT(comm, receive_as(comm, I32, data, 4, 0, 5) == EVEN_OK);
  RANKS_EXPECT(comm, receive_as(comm, I32, data, 0, 0, 6) == EVEN_OK);
  steps_reach(step, 2);
  even_comm_request *early = begin_as(comm, I64, data, 4, 0, 8, false);
  RANKS_EXPECT(comm, send_as(comm, I32, data, 1, 0, 7) == EVEN_OK);
  steps_await(step, 3);
  RANKS_EXPECT(comm, end(early, NULL) == EVEN_ERR_MISMATCH && mentions("4 bytes of F32 with tag 8"));
  RANKS_EXPECT(comm, receive_as(comm, F32, data, 4, 0, 8) == EVEN_OK);
  RANKS_EXPECT(comm, receive_as(comm, I32, data, LARGE, 0, 9) == EVEN_ERR_MISMATCH && mentions("of F32 with tag 9"));
  RANKS_EXPECT(comm, receive_as(comm, F32, data, LARGE, 0, 9) == EVEN_OK);
  RANKS_EXPECT(comm, receive_as(comm, I32, data, 4, EVEN_COMM_ANY_RANK, 10) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, even_error_last()->rank == 2 && mentions("sent 4 bytes of F32 with tag 10"));
  early = begin_as(comm, F32, data, 4, EVEN_COMM_ANY_RANK, 10, false);
  RANKS_EXPECT(comm, end(early, &peer) == EVEN_OK && peer == 2);
  steps_reach(step, 4);
  return 0;
}

static int pass_messages(even_comm *comm, void *argument) {
  unsigned char *data = calloc(1, LARGE);
  int own = even_comm_rank(comm);
  int wrong = own == 0   ? send_all(comm, data, argument)
              : own == 1 ? receive_all(comm, data, argument)
                         : send_as(comm, F32, data, 4, 1, 10) != EVEN_OK;
  if (wrong != 0) {
    steps_reach(argument, 4); /* nobody waits for it */
  }
  steps_await(argument, 4);
  free(data);
  return wrong != 0 || even_comm_barrier(comm) != EVEN_OK;
}

/* ---- all-to-alls ---- */

typedef struct exchange {
  uint32_t elements;
  size_t sends[RANKS];
  size_t receives[RANKS];
} exchange;

static void set_both(exchange *job, int rank, size_t bytes) {
  job->sends[rank] = job->receives[rank] = bytes;
}

static even_status exchange_as(even_comm *comm, const exchange *job, unsigned char *input, unsigned char *output) {
  const even_comm_called called = {.elements = job->elements};
  const void *inputs[RANKS];
  void *outputs[RANKS];
  for (int rank = 0; rank < RANKS; rank++) {
    inputs[rank] = input + (size_t)rank * LARGE;
    outputs[rank] = output + (size_t)rank * LARGE;
    memset(input + (size_t)rank * LARGE, even_comm_rank(comm) * RANKS + rank, job->sends[rank]);
  }
  even_comm_call_as(&called);
  even_status status = even_comm_all_to_all(comm, inputs, job->sends, outputs, job->receives);
  even_comm_call_as(NULL);
  return status;
}

static int check_output(even_comm *comm, const exchange *job, const unsigned char *output) {
  for (int rank = 0; rank < RANKS; rank++) {
    for (size_t i = 0; i < job->receives[rank]; i++) {
      RANKS_EXPECT(comm, output[(size_t)rank * LARGE + i] == rank * RANKS + even_comm_rank(comm));
    }
  }
  return 0;
}

/* Between ranks 0 and 1 bytes meet floats; rank 2, which has nothing for them, may mean anything. */
static int exchange_what_fits(even_comm *comm, unsigned char *input, unsigned char *output) {
  int own = even_comm_rank(comm);
  for (int large = 0; large < 4; large++) {
    exchange job = {.elements = own == 2 ? I64 : large < 2 && own == 1 ? U8 : F32};
    for (int rank = 0; rank < RANKS; rank++) {
      set_both(&job, rank, (own == 2) != (rank == 2) ? 0 : large % 2 == 0 ? 8 : LARGE);
    }
    RANKS_EXPECT(comm, exchange_as(comm, &job, input, output) == EVEN_OK);
    RANKS_EXPECT(comm, check_output(comm, &job, output) == 0);
  }
  return 0;
}

typedef enum difference { DTYPE, LARGE_DTYPE, SIZE, MORE_SENT, DIFFERENCES } difference;

static exchange different(difference what, int own) {
  exchange job = {.elements = F32};
  for (int rank = 0; rank < RANKS; rank++) {
    set_both(&job, rank, what == LARGE_DTYPE ? LARGE : 8);
  }
  job.elements = own == 1 && what <= LARGE_DTYPE ? I32 : F32;
  job.receives[2] = own != 1 ? job.receives[2] : what == SIZE ? 12 : what == MORE_SENT ? 4 : job.receives[2];
  return job;
}

static const char *const words[DIFFERENCES] = {"8 bytes of ", "1048576 bytes of ", "which expects 12",
                                               "which expects 4"};

/* Rank 1 alone means something else; all ranks, rank 0 with them, which has to do with none of it, are told both lines.
 */
static int exchange_what_differs(even_comm *comm, const difference what, unsigned char *input, unsigned char *output) {
  const exchange job = different(what, even_comm_rank(comm));
  even_comm_set_site(comm, even_comm_rank(comm) == 1 ? "train.py:7" : "train.py:41");
  RANKS_EXPECT(comm, exchange_as(comm, &job, input, output) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, mentions("in all_to_all rank ") && mentions(words[what]));
  RANKS_EXPECT(comm, mentions("train.py:7") && mentions("train.py:41"));
  RANKS_EXPECT(comm, what > LARGE_DTYPE || (mentions("of F32") && mentions("of I32")));
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_MISMATCH);
  return 0;
}

static int exchange_parts(even_comm *comm, void *argument) {
  const difference what = *(difference *)argument;
  unsigned char *input = malloc(RANKS * LARGE);
  unsigned char *output = malloc(RANKS * LARGE);
  int wrong = (what == DTYPE && exchange_what_fits(comm, input, output) != 0) ||
              exchange_what_differs(comm, what, input, output) != 0;
  free(input);
  free(output);
  return wrong;
}

/* ---- over every engine ---- */

static void check(const ranks_setup *setup) {
  steps *step = steps_make();
  assert_non_null(step);
  assert_int_equal(ranks_run(setup, pass_messages, step, NULL), 0);
  steps_free(step);
  for (difference what = DTYPE; what < DIFFERENCES; what++) {
    assert_int_equal(ranks_run(setup, exchange_parts, &what, NULL), 0);
  }
}

static void on_one_host(void **state) {
  ranks_setup setup = {.ranks = RANKS, .timeout_seconds = 300, .spin = -1};
  (void)state;
  check(&setup);
  setup.threads = true;
  check(&setup);
}

static void over_a_network(void **state) {
  const ranks_setup setup = {.ranks = RANKS, .timeout_seconds = 300, .spin = -1, .engine = RANKS_NETWORK};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  check(&setup);
}

static void over_mpi(void **state) {
  const ranks_setup setup = {
      .ranks = RANKS, .timeout_seconds = 300, .spin = -1, .engine = RANKS_NETWORK, .mpi = FAKE_MPI_NUMBERS};
  (void)state;
  check(&setup);
}

static void over_hosts(void **state) {
  const ranks_setup setup = {
      .ranks = RANKS, .timeout_seconds = 300, .spin = -1, .engine = RANKS_HOSTS, .host_of = HOST_OF};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  check(&setup);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(on_one_host),
      cmocka_unit_test(over_a_network),
      cmocka_unit_test(over_mpi),
      cmocka_unit_test(over_hosts),
  };
  return cmocka_run_group_tests_name("ranks that mean different things", tests, NULL, NULL);
}
