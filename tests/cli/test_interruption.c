/* Tracebacks of an interruption are not shown, and everything else is. */
#include "base/text.h"
#include "cli/interruption.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define HEAD "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n    step()\n"
#define LINK "\nDuring handling of the above exception, another exception occurred:\n\n"
#define CAUSE "\nThe above exception was the direct cause of the following exception:\n\n"
#define LOST                                                                                        \
  HEAD "evenstep._core.Error: all-reduce: rank 1 (process 12) ended while this rank waited for it " \
       "(EVEN_ERR_PEER_LOST)\n"                                                                     \
       "  fix: its own output says why\n"

static void add_line(void *context, const char *text, size_t length) {
  even_text_append(context, text, length);
  even_text_add(context, "\n");
}

/* What is shown of `error`, the lines of a rank's standard error. */
static void assert_shown(const char *error, const char *expected) {
  even_text shown = EVEN_TEXT_EMPTY;
  even_interruption of = {0};
  for (const char *at = error; *at != '\0';) {
    size_t length = strcspn(at, "\n");
    even_interruption_take(&of, at, length, add_line, &shown);
    at += length + 1;
  }
  even_interruption_end(&of, add_line, &shown);
  assert_string_equal(even_text_string(&shown), expected);
  assert_null(of.held.data);
  even_text_free(&shown);
}

static void what_the_interruption_caused_is_not_shown(void **state) {
  (void)state;
  assert_shown(HEAD "KeyboardInterrupt\n", "");
  assert_shown("saving\n" HEAD "KeyboardInterrupt\nbye\n", "saving\nbye\n");
  assert_shown(LOST, "");
  assert_shown(
      "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"train.py\", line 3, in <module>\n"
      "[rank0]:     step()\n[rank0]: KeyboardInterrupt\n",
      "");
  assert_shown(LOST LINK HEAD "KeyboardInterrupt\n", "");
  assert_shown(LOST CAUSE HEAD "KeyboardInterrupt\nbye\n", "bye\n");
  assert_shown(HEAD "KeyboardInterrupt\n" HEAD "KeyboardInterrupt\n", "");
  assert_shown("Exception ignored in: <function stop at 0x1>\n" HEAD "KeyboardInterrupt: \n", "");
}

static void a_failure_of_its_own_is_shown_whole(void **state) {
  (void)state;
  static const char full[] = HEAD "OSError: [Errno 28] No space left on device\n";
  static const char chain[] = HEAD "KeyboardInterrupt\n" LINK HEAD "OSError: [Errno 28] No space left on device\n";
  assert_shown(full, full);
  assert_shown(chain, chain);
  assert_shown(HEAD "KeyboardInterrupt\n" HEAD "OSError: [Errno 28] No space left on device\n", full);
  assert_shown(HEAD "OSError: full\n  of the disk\nbye\n", HEAD "OSError: full\n  of the disk\nbye\n");
}

static void what_is_cut_off_is_shown(void **state) {
  (void)state;
  assert_shown(HEAD, HEAD); /* killed while it printed */
  assert_shown("", "");
  assert_shown("\n  indented\n", "\n  indented\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_the_interruption_caused_is_not_shown),
      cmocka_unit_test(a_failure_of_its_own_is_shown_whole),
      cmocka_unit_test(what_is_cut_off_is_shown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
