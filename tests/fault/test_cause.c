/* Causes: one line that names rank, place and reason, and the rank that began it. */
#include "fault/cause.h"
#include "recorded.h"
#include "support/fault.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static even_fault_facts facts_of(int signal, int code, const char *error) {
  return (even_fault_facts){.rank = 1,
                            .device = "cpu:1",
                            .host = "box",
                            .pid = 77,
                            .signal = signal,
                            .code = code,
                            .error = error,
                            .error_length = strlen(error)};
}

static void assert_cause(const even_fault_facts *facts, const char *expected) {
  even_text cause = EVEN_TEXT_EMPTY;
  even_text excerpt = EVEN_TEXT_EMPTY;
  assert_int_equal(even_fault_explain(facts, &cause, &excerpt), EVEN_OK);
  if (strstr(cause.data, expected) == NULL) {
    fail_msg("\"%s\" does not say \"%s\"", cause.data, expected);
  }
  assert_null(strchr(cause.data, '\n'));
  assert_non_null(excerpt.data);
  even_text_free(&cause);
  even_text_free(&excerpt);
}

static void tells_exceptions(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(0, 1, RECORDED_OWN_ERROR);
  assert_cause(
      &facts,
      "rank 1 (cpu:1 on box, process 77) exited with code 1: ValueError: Expected input batch_size (8) to match "
      "target batch_size (4). (train.py:30, in main)");
  facts = facts_of(0, 1, RECORDED_SYNTAX);
  assert_cause(&facts, "exited with code 1: SyntaxError: invalid syntax (train.py:2)");
  facts = facts_of(0, 9, "some\nerror: disk gone\n\n");
  assert_cause(&facts, "exited with code 9: error: disk gone");
  facts = facts_of(0, 9, "");
  assert_cause(&facts, "exited with code 9");
}

static void tells_signals(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(SIGKILL, 0, "");
  assert_cause(&facts, "killed by SIGKILL, sent from outside");
  facts.signal = SIGTERM; /* who sent it is not known */
  assert_cause(&facts, "ended by SIGTERM (kill, a job scheduler, or the script itself)");
  facts = facts_of(SIGSEGV, 0, RECORDED_FATAL);
  assert_cause(&facts, "crashed with SIGSEGV");
  facts = facts_of(SIGBUS, 0, "");
  assert_cause(&facts, "/dev/shm");
  facts = facts_of(SIGUSR1, 0, "");
  assert_cause(&facts, "ended by signal 10");
}

static void tells_memory(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(SIGKILL, 0, "");
  facts.out_of_memory = true;
  facts.peak_memory_bytes = 3u << 30;
  assert_cause(&facts, "killed by the kernel's out-of-memory killer (it held up to 3.0 GiB)");
  facts.signal = 0;
  facts.code = 1;
  facts.peak_memory_bytes = 200u << 20;
  assert_cause(&facts, "failed after the kernel's out-of-memory killer ended a process of it (it held up to 200 MiB)");
}

static void tells_the_others(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(0, 0, "");
  assert_cause(&facts, "ended well");
  facts = facts_of(SIGTERM, 0, "");
  facts.stopped_by_agent = true;
  assert_cause(&facts, "stopped because another rank failed");
  facts.stood_still = true;
  assert_cause(&facts, "was stopped (SIGSTOP, SIGTSTP), sent from outside, and stood still");
}

static void tells_a_hang(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(SIGTERM, 0, "");
  facts.stopped_by_agent = true;
  facts.hung = "no progress for 31 s in data";
  assert_cause(&facts, "hung, and was ended for it: no progress for 31 s in data (its stacks are in logs/hang-rank-");
}

static void keeps_the_cause_printable(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(0, 1, "");
  facts.error = "\033[31mred\0\n";
  facts.error_length = 10;
  assert_cause(&facts, "exited with code 1:  [31mred");
}

static void cuts_the_excerpt(void **state) {
  (void)state;
  even_text long_output = EVEN_TEXT_EMPTY;
  even_text cause = EVEN_TEXT_EMPTY;
  even_text excerpt = EVEN_TEXT_EMPTY;
  for (int i = 0; i < 200; i++) {
    even_text_format(&long_output, "line %d\n", i);
  }
  even_fault_facts facts = facts_of(0, 1, long_output.data);
  assert_int_equal(even_fault_explain(&facts, &cause, &excerpt), EVEN_OK);
  assert_non_null(strstr(excerpt.data, "line 199"));
  assert_null(strstr(excerpt.data, "line 100\n"));
  even_text_free(&long_output);
  even_text_free(&cause);
  even_text_free(&excerpt);
}

static void finds_the_culprit(void **state) {
  (void)state;
  even_fault_facts well = facts_of(0, 0, "");
  even_fault_facts peer = facts_of(0, 1, RECORDED_PEER);
  even_fault_facts own = facts_of(0, 1, RECORDED_OWN_ERROR);
  even_fault_facts killed = facts_of(SIGKILL, 0, "");
  even_fault_facts stopped = facts_of(SIGTERM, 0, "");
  even_fault_facts slow = facts_of(SIGTERM, 0, RECORDED_OWN_ERROR);
  even_fault_facts memory = killed;
  even_fault_facts stood = stopped;
  even_fault_facts hung = stopped;
  stood.stood_still = true;
  hung.hung = "no progress";
  hung.stopped_by_agent = true;
  stopped.stopped_by_agent = stood.stopped_by_agent = true;
  slow.stopped_by_agent = true;
  memory.out_of_memory = true;
  const struct {
    even_fault_facts ends[3];
    size_t culprit;
  } cases[] = {
      {{well, well, well}, 3},       {{own, stopped, stopped}, 0},
      {{peer, own, stopped}, 1},    /* hung up on, and seen first */
      {{peer, stopped, slow}, 2},   /* it had raised already, and was slow to end */
      {{peer, killed, stopped}, 1}, /* somebody's kill -9 */
      {{peer, peer, stood}, 2},     /* somebody's kill -STOP */
      {{peer, stopped, hung}, 2},   /* ended by the agent, for this */
      {{own, peer, stood}, 0},       {{own, own, killed}, 2},
      {{killed, memory, peer}, 1},   {{peer, stopped, peer}, 0}, /* no better known: the first */
      {{stopped, well, stopped}, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(even_fault_culprit(cases[i].ends, 3), cases[i].culprit);
  }
  assert_int_equal(even_fault_culprit(NULL, 0), 0);
}

static void names_the_one_that_left_early(void **state) {
  (void)state;
  even_fault_facts well = facts_of(0, 0, "");
  even_fault_facts other = facts_of(0, 0, "");
  even_fault_facts lost = facts_of(0, 1, RECORDED_LOST); /* names process 77 */
  even_fault_facts gloo = facts_of(0, 1, RECORDED_PEER); /* names none */
  even_fault_facts own = facts_of(0, 1, RECORDED_OWN_ERROR);
  even_fault_facts told = facts_of(0, 0, ""); /* ended well when the agent told it to */
  even_fault_facts awaited = facts_of(0, 0, "");
  even_fault_facts opening = facts_of(0, 0, "");
  even_fault_facts stopped = facts_of(SIGTERM, 0, "");
  other.pid = 78;
  lost.pid = own.pid = gloo.pid = 79;
  told.stopped_by_agent = true;
  stopped.stopped_by_agent = true;
  awaited.leave = EVEN_LEAVE_BEFORE_JOINING;
  opening.leave = EVEN_LEAVE_BEFORE_OPENING;
  const struct {
    even_fault_facts ends[3];
    size_t culprit;
  } cases[] = {
      {{lost, other, well}, 2},   {{other, lost, other}, 1}, /* 78 had done its part */
      {{other, gloo, well}, 0},   {{well, own, lost}, 1},         {{gloo, told, stopped}, 0},
      {{lost, told, stopped}, 0}, {{other, awaited, stopped}, 1}, {{stopped, other, opening}, 2},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(even_fault_culprit(cases[i].ends, 3), cases[i].culprit);
  }
  assert_true(even_fault_is_secondary(&lost) && even_fault_is_secondary(&gloo));
  assert_false(even_fault_is_secondary(&own) || even_fault_is_secondary(&well));
  assert_cause(&awaited, "rank 1 (cpu:1 on box, process 77) ended with code 0 without es.prepare");
  well.leave = EVEN_LEAVE_EARLY;
  assert_cause(&well, "ended with code 0 while the others were still training: let every rank make the same steps");
  well.steps_known = true;
  well.steps = 5;
  assert_cause(&well, "ended with code 0 at step 5 while");
}

/* A rank that has nothing left to do may end with code 0: a server that another one does not reach is not its doing. */
static void a_server_that_is_down_is_nobody_elses_fault(void **state) {
  (void)state;
  even_fault_facts done = facts_of(0, 0, "");
  even_fault_facts server = facts_of(0, 1, RECORDED_SERVER);
  even_fault_facts interrupted = facts_of(0, 1, RECORDED_INTERRUPT);
  even_fault_facts store = facts_of(0, 1, RECORDED_STORE);
  even_fault_facts gloo = facts_of(0, 1, RECORDED_PEER);
  even_fault_facts own = facts_of(0, 1, RECORDED_OWN_ERROR);
  even_fault_facts slow = facts_of(SIGTERM, 0, RECORDED_OWN_ERROR);
  even_fault_facts stopped = facts_of(SIGTERM, 0, "");
  slow.stopped_by_agent = stopped.stopped_by_agent = true;
  const struct {
    even_fault_facts ends[3];
    size_t culprit;
  } cases[] = {
      {{done, server, stopped}, 1}, {{done, interrupted, stopped}, 1}, {{done, store, stopped}, 0},
      {{gloo, server, stopped}, 1}, /* it went away for a reason of its own, and was hung up on */
      {{server, own, stopped}, 1},  {{server, slow, stopped}, 1},      {{server, stopped, stopped}, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(even_fault_culprit(cases[i].ends, 3), cases[i].culprit);
  }
  assert_true(even_fault_is_secondary(&server)); /* it may be for lack of a rank: worth a moment's wait */
}

/* A place is set aside for what is its own fault alone. */
static void whose_place_is_at_fault(void **state) {
  (void)state;
  even_fault_facts well = facts_of(0, 0, "");
  even_fault_facts peer = facts_of(0, 1, RECORDED_PEER);
  even_fault_facts own = facts_of(0, 1, RECORDED_OWN_ERROR);
  even_fault_facts broken = facts_of(0, 1,
                                     "Traceback (most recent call last):\n"
                                     "  File \"/home/u/train.py\", line 3, in <module>\n"
                                     "    loss.backward()\n"
                                     "RuntimeError: CUDA error: uncorrectable ECC error encountered\n");
  even_fault_facts asserted = facts_of(0, 1,
                                       "Traceback (most recent call last):\n"
                                       "  File \"/home/u/train.py\", line 3, in <module>\n"
                                       "    loss.backward()\n"
                                       "RuntimeError: CUDA error: device-side assert triggered\n");
  even_fault_facts killed = facts_of(SIGKILL, 0, "");
  even_fault_facts crashed = facts_of(SIGSEGV, 0, "");
  even_fault_facts ended = facts_of(SIGTERM, 0, "");
  even_fault_facts stopped = facts_of(SIGTERM, 0, "");
  even_fault_facts late = facts_of(SIGTERM, 0, RECORDED_OWN_ERROR);
  even_fault_facts memory = killed;
  even_fault_facts stood = stopped;
  even_fault_facts hung = stopped;
  even_fault_facts slow = stopped;
  even_fault_facts lost = facts_of(0, 1, "");
  even_fault_facts left = well;
  stopped.stopped_by_agent = late.stopped_by_agent = true;
  memory.out_of_memory = true;
  stood.stood_still = true;
  hung.hung = "no progress";
  slow.slow = "it takes long";
  lost.lost = "no sign of life";
  left.leave = EVEN_LEAVE_BEFORE_JOINING;
  const struct {
    even_fault_facts ends[3];
    size_t culprit;
    bool of_place;
  } cases[] = {
      {{killed, stopped, stopped}, 0, true},
      {{peer, crashed, stopped}, 1, true},
      {{peer, peer, hung}, 2, true},
      {{broken, peer, stopped}, 0, true},
      {{own, stopped, stopped}, 0, false}, /* as likely another one's in the next attempt */
      {{asserted, stopped, stopped}, 0, false},
      {{killed, killed, stopped}, 0, false}, /* the job was killed */
      {{crashed, own, stopped}, 0, false},
      {{crashed, late, stopped}, 0, false},
      {{broken, broken, stopped}, 0, false}, /* a driver, not a device */
      {{hung, hung, stopped}, 0, false},
      {{ended, stopped, stopped}, 0, false},
      {{memory, stopped, stopped}, 0, false},
      {{stood, peer, peer}, 0, false},
      {{slow, peer, peer}, 0, false},
      {{lost, peer, peer}, 0, false},
      {{left, stopped, stopped}, 0, false},
      {{peer, stopped, stopped}, 0, false}, /* revoked */
      {{stopped, stopped, stopped}, 0, false},
      {{well, well, well}, 3, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    if (even_fault_is_of_place(cases[i].ends, 3, cases[i].culprit) != cases[i].of_place) {
      fail_msg("case %zu", i);
    }
  }
}

/* The traceback of an exception of these words. */
static even_fault_facts raised(char *room, size_t bytes, const char *exception) {
  (void)snprintf(
      room, bytes,
      "Traceback (most recent call last):\n  File \"/home/u/train.py\", line 3, in <module>\n    step()\n%s\n",
      exception);
  return facts_of(0, 1, room);
}

/* Each as the libraries write it. */
static void what_an_error_says_of_its_place(void **state) {
  (void)state;
  static const struct {
    const char *exception;
    even_place_blame blame;
  } cases[] = {
      {"RuntimeError: CUDA error: uncorrectable ECC error encountered", EVEN_PLACE_BROKEN},
      {"torch.AcceleratorError: CUDA error: unknown error", EVEN_PLACE_BROKEN},
      {"torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", EVEN_PLACE_BROKEN},
      {"RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
       EVEN_PLACE_BROKEN},
      {"RuntimeError: HIP error: unknown error", EVEN_PLACE_BROKEN},
      {"RuntimeError: No HIP GPUs are available: no ROCm-capable device is detected", EVEN_PLACE_BROKEN},
      {"RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", EVEN_PLACE_BROKEN},
      {"pynvml.NVMLError_GpuIsLost: GPU is lost", EVEN_PLACE_BROKEN},
      {"torch.AcceleratorError: CUDA error: an illegal memory access was encountered", EVEN_PLACE_SUSPECT},
      {"RuntimeError: HIP error: unspecified launch failure", EVEN_PLACE_SUSPECT},
      {"RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa)`",
       EVEN_PLACE_SUSPECT},
      {"RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", EVEN_PLACE_SUSPECT},
      {"torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error (run with "
       "NCCL_DEBUG=INFO for details), NCCL version 2.26.2",
       EVEN_PLACE_SUSPECT},
      {"RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. ", EVEN_PLACE_SUSPECT},
      {"OSError: [Errno 5] Input/output error: '/data/part-3'", EVEN_PLACE_SUSPECT},
      {"OSError: [Errno 116] Stale file handle", EVEN_PLACE_SUSPECT},
      /* the others would meet these as well */
      {"RuntimeError: CUDA error: device-side assert triggered", EVEN_PLACE_SPARED},
      {"RuntimeError: CUDA error: invalid device ordinal", EVEN_PLACE_SPARED},
      {"FileNotFoundError: [Errno 2] No such file or directory: 'part-3'", EVEN_PLACE_SPARED},
      {"ValueError: could not convert string to float: 'x'", EVEN_PLACE_SPARED},
      {"requests.HTTPError: 503: service busy or unavailable", EVEN_PLACE_SPARED},
      {"RuntimeError: data set: system not yet initialized", EVEN_PLACE_SPARED},
      {"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", EVEN_PLACE_SPARED},
      /* another rank's */
      {"torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or there was "
       "a network error, ncclRemoteError: unhandled cuda error",
       EVEN_PLACE_SPARED},
  };
  char room[512];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_fault_facts facts = raised(room, sizeof room, cases[i].exception);
    if (even_fault_blames_place(&facts) != cases[i].blame) {
      fail_msg("%s", cases[i].exception);
    }
    facts.code = 0; /* it went on after it */
    assert_int_equal(even_fault_blames_place(&facts), EVEN_PLACE_SPARED);
    facts.signal = SIGTERM;
    assert_int_equal(even_fault_blames_place(&facts), EVEN_PLACE_SPARED);
  }
  even_fault_facts silent = facts_of(0, 1, "CUDA error: unknown error\n"); /* a line of a log */
  assert_int_equal(even_fault_blames_place(&silent), EVEN_PLACE_SPARED);
}

static even_status explain(void *context) {
  even_text cause = EVEN_TEXT_EMPTY;
  even_text excerpt = EVEN_TEXT_EMPTY;
  even_status status = even_fault_explain(context, &cause, &excerpt);
  even_text_free(&cause);
  even_text_free(&excerpt);
  return status;
}

static void survives_lack_of_memory(void **state) {
  (void)state;
  even_fault_facts facts = facts_of(0, 1, RECORDED_OWN_ERROR);
  assert_true(fault_each_allocation(explain, &facts) >= 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(tells_exceptions),
      cmocka_unit_test(tells_signals),
      cmocka_unit_test(tells_memory),
      cmocka_unit_test(tells_the_others),
      cmocka_unit_test(finds_the_culprit),
      cmocka_unit_test(tells_a_hang),
      cmocka_unit_test(keeps_the_cause_printable),
      cmocka_unit_test(names_the_one_that_left_early),
      cmocka_unit_test(a_server_that_is_down_is_nobody_elses_fault),
      cmocka_unit_test(whose_place_is_at_fault),
      cmocka_unit_test(what_an_error_says_of_its_place),
      cmocka_unit_test(cuts_the_excerpt),
      cmocka_unit_test(survives_lack_of_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
