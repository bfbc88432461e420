/* Words of a line as a shell takes them: blanks, quotes, what a \ does, and lines that are none. */
#include "base/fail.h"
#include "cli/shell_words.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 4 };

static char text[128];
static char *words[MOST + 1];

static even_status split(const char *line, size_t *count) {
  (void)snprintf(text, sizeof text, "%s", line);
  return even_shell_words_split(text, words, MOST, count);
}

/* `expected` apart by "|". */
static void assert_words(const char *line, const char *expected) {
  char joined[128] = "";
  size_t count = 0;
  assert_int_equal(split(line, &count), EVEN_OK);
  for (size_t i = 0; i < count; i++) {
    size_t length = strlen(joined);
    (void)snprintf(joined + length, sizeof joined - length, "%s%s", i == 0 ? "" : "|", words[i]);
  }
  assert_string_equal(joined, expected);
  assert_null(words[count]);
}

static void blanks_part_words(void **state) {
  (void)state;
  assert_words("ssh", "ssh");
  assert_words("  ssh -p\t2222  ", "ssh|-p|2222");
  assert_words("", "");
  assert_words(" \t", "");
}

static void quotes_keep_them_together(void **state) {
  (void)state;
  assert_words("ssh -i 'my key'", "ssh|-i|my key");
  assert_words("ssh -o ProxyCommand=\"nc -x jump %h\"", "ssh|-o|ProxyCommand=nc -x jump %h");
  assert_words("a 'b'\"c d\"e", "a|bc de");
  assert_words("a '' b", "a||b");
  assert_words("'it \"is\"' \"it's\"", "it \"is\"|it's");
}

static void a_backslash_takes_the_next_sign(void **state) {
  (void)state;
  assert_words("my\\ key \\'", "my key|'");
  assert_words("\"a\\\"b\\\\c\\d\"", "a\"b\\c\\d");
  assert_words("'a\\b'", "a\\b");
  assert_words("end\\", "end\\");
}

static void other_lines_are_refused(void **state) {
  (void)state;
  size_t count = 0;
  assert_int_equal(split("ssh -i 'key", &count), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->what, "'"));
  assert_int_equal(split("ssh \"", &count), EVEN_ERR_USAGE);
  assert_int_equal(split("a b c d", &count), EVEN_OK);
  assert_int_equal(split("a b c d e", &count), EVEN_ERR_USAGE);
  assert_int_equal(count, MOST);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(blanks_part_words),
      cmocka_unit_test(quotes_keep_them_together),
      cmocka_unit_test(a_backslash_takes_the_next_sign),
      cmocka_unit_test(other_lines_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
