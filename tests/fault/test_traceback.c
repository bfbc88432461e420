/* Tracebacks found in what ranks printed. */
#include "fault/traceback.h"
#include "recorded.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void assert_part(even_span_text part, const char *text) {
  assert_non_null(part.start);
  assert_int_equal(part.length, strlen(text));
  assert_memory_equal(part.start, text, part.length);
}

static even_traceback found_in(const char *text) {
  even_traceback traceback;
  assert_true(even_traceback_find(text, strlen(text), &traceback));
  return traceback;
}

static void names_the_users_own_frame(void **state) {
  (void)state;
  even_traceback traceback = found_in(RECORDED_OWN_ERROR);
  assert_part(traceback.exception, "ValueError: Expected input batch_size (8) to match target batch_size (4).");
  assert_part(traceback.file, "/home/u/train.py");
  assert_part(traceback.function, "main");
  assert_int_equal(traceback.line, 30);
  assert_memory_equal(traceback.block.start, "Traceback", 9);
}

static void keeps_the_fix_of_our_own_errors(void **state) {
  (void)state;
  static const char text[] =
      "Traceback (most recent call last):\n"
      "  File \"/home/u/train.py\", line 6, in <module>\n"
      "    es.prepare(model)\n"
      "[rank0]: evenstep.EvenstepError: argument 1 has no parameters\n"
      "[rank0]:   fix: leave it out\n"
      "  fix: no line of the error\n";
  even_traceback traceback = found_in(text);
  assert_part(traceback.exception, "evenstep.EvenstepError: argument 1 has no parameters");
  static const char last[] = "  fix: leave it out";
  assert_memory_equal(traceback.block.start + traceback.block.length - strlen(last), last, strlen(last));
}

static void takes_the_last_of_a_chain(void **state) {
  (void)state;
  even_traceback traceback = found_in(RECORDED_CHAIN);
  assert_part(traceback.exception, "RuntimeError: no such table");
  assert_int_equal(traceback.line, 7);
}

static void passes_over_destructors(void **state) {
  (void)state;
  even_traceback traceback = found_in(RECORDED_OWN_ERROR RECORDED_DESTRUCTOR);
  assert_int_equal(traceback.line, 30);
  assert_false(even_traceback_find(RECORDED_DESTRUCTOR, strlen(RECORDED_DESTRUCTOR), &traceback));
}

static void reads_syntax_errors(void **state) {
  (void)state;
  even_traceback traceback = found_in(RECORDED_SYNTAX);
  assert_part(traceback.exception, "SyntaxError: invalid syntax");
  assert_int_equal(traceback.line, 2);
  assert_null(traceback.function.start);
}

static void reads_through_torchs_prefix(void **state) {
  (void)state;
  even_traceback traceback = found_in(RECORDED_TORCH_PREFIX);
  assert_part(traceback.exception, "ValueError: bad");
  assert_int_equal(traceback.line, 8);
}

static void survives_what_is_no_traceback(void **state) {
  (void)state;
  even_traceback traceback;
  static const char *const texts[] = {
      "",
      "\n",
      "Traceback (most recent call last):",
      "Traceback (most recent call last):\n  File \"",
      "Traceback (most recent call last):\n  File \"x\", line 99999999999999999999, in f\n",
      "  File \"x\", line 1\n",
  };
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    assert_false(even_traceback_find(texts[i], strlen(texts[i]), &traceback));
  }
  assert_false(even_traceback_find("\0\xff\n\0", 4, &traceback));
}

/* Cut anywhere, as the end of a ring may cut it: no read outside (the sanitizer watches), no nonsense. */
static void survives_every_cut(void **state) {
  (void)state;
  static const char whole[] = RECORDED_OWN_ERROR RECORDED_DESTRUCTOR RECORDED_SYNTAX RECORDED_TORCH_PREFIX;
  even_traceback traceback;
  for (size_t from = 0; from < sizeof whole - 1; from++) {
    size_t length = sizeof whole - 1 - from;
    char *copy = malloc(length);
    assert_non_null(copy);
    memcpy(copy, whole + from, length);
    if (even_traceback_find(copy, length, &traceback)) {
      assert_true(traceback.exception.start >= copy &&
                  traceback.exception.start + traceback.exception.length <= copy + length);
    }
    if (even_traceback_find(whole, length, &traceback)) {
      assert_true(traceback.exception.length > 0);
    }
    free(copy);
  }
}

static void takes_last_lines(void **state) {
  (void)state;
  assert_part(even_traceback_last_lines("a\nb\nc\n\n", 7, 2), "b\nc");
  assert_part(even_traceback_last_lines("a", 1, 3), "a");
  assert_null(even_traceback_last_lines("\n \n", 3, 1).start);
}

static void knows_whose_fault_it_is(void **state) {
  (void)state;
  static const struct {
    const char *output;
    even_traceback_blame blame;
  } cases[] = {
      {RECORDED_PEER, EVEN_BLAME_PEER},      {RECORDED_LOST, EVEN_BLAME_PEER},
      {RECORDED_STORE, EVEN_BLAME_PEER},     {RECORDED_OWN_ERROR, EVEN_BLAME_OWN},
      {RECORDED_SERVER, EVEN_BLAME_UNCLEAR}, {RECORDED_INTERRUPT, EVEN_BLAME_UNCLEAR},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_traceback traceback = found_in(cases[i].output);
    assert_int_equal(even_traceback_blames(&traceback), cases[i].blame);
  }
  even_traceback nothing = {0};
  assert_int_equal(even_traceback_blames(&nothing), EVEN_BLAME_OWN);
}

static void keeps_the_innermost_frame(void **state) {
  (void)state;
  even_traceback traceback = found_in(RECORDED_STORE);
  assert_part(traceback.file, "/home/u/train.py");
  assert_part(traceback.innermost, "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py");
}

static void knows_lack_of_memory(void **state) {
  static const struct {
    const char *exception;
    bool of_memory;
  } cases[] = {{"MemoryError", true},
               {"numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB", true},
               {"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", true},
               {"RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", true},
               {"OSError: [Errno 12] Cannot allocate memory", true},
               {"evenstep._core.EvenstepError: rank 1 ran out of memory in a batch of 16 samples", true},
               {"ValueError: out of memory", false},
               {"evenstep._core.EvenstepError: memory does not hold the global batch", false},
               {"RuntimeError: shape mismatch", false}};
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char text[256];
    (void)snprintf(text, sizeof text, "Traceback (most recent call last):\n  File \"t.py\", line 1, in f\n%s\n",
                   cases[i].exception);
    even_traceback traceback = found_in(text);
    assert_int_equal(even_traceback_is_of_memory(&traceback), cases[i].of_memory);
  }
  even_traceback nothing = {0};
  assert_false(even_traceback_is_of_memory(&nothing));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(names_the_users_own_frame),
      cmocka_unit_test(keeps_the_fix_of_our_own_errors),
      cmocka_unit_test(takes_the_last_of_a_chain),
      cmocka_unit_test(passes_over_destructors),
      cmocka_unit_test(reads_syntax_errors),
      cmocka_unit_test(reads_through_torchs_prefix),
      cmocka_unit_test(survives_what_is_no_traceback),
      cmocka_unit_test(survives_every_cut),
      cmocka_unit_test(takes_last_lines),
      cmocka_unit_test(knows_whose_fault_it_is),
      cmocka_unit_test(keeps_the_innermost_frame),
      cmocka_unit_test(knows_lack_of_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
