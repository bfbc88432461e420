/* What the made-up NVML reads to know how its GPUs are; for tests, behind <cmocka.h>. */
#ifndef EVEN_TESTS_FAKE_NVML_STATE_H
#define EVEN_TESTS_FAKE_NVML_STATE_H

#include <stdio.h>

/* Replaces the file STATE or STATE.suffix at once: the thread that watches never reads half of it. */
static inline void fake_nvml_say(const char *state, const char *suffix, const char *words) {
  char made[96];
  char name[96];
  (void)snprintf(made, sizeof made, "%s.new", state);
  (void)snprintf(name, sizeof name, "%s%s", state, suffix);
  FILE *file = fopen(made, "w");
  assert_non_null(file);
  assert_true(fputs(words, file) >= 0);
  assert_int_equal(fclose(file), 0);
  assert_int_equal(rename(made, name), 0);
}

#endif
