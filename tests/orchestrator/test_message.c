/* Messages between agents: cut out of a stream whole or not at all, within their limits. */
#include "orchestrator/message.h"

#include "orchestrator/remote_start.h"
#include "support/fault.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const unsigned char *bytes_of(const even_text *text) {
  return (const unsigned char *)text->data;
}

static void comes_out_as_it_went_in(void **state) {
  even_text stream = EVEN_TEXT_EMPTY;
  even_message message;
  size_t used = 0;
  size_t wanted = 0;
  (void)state;
  assert_int_equal(even_message_add(&stream, EVEN_MESSAGE_ENDED, "{\"rank\":1}", 10, "\0two", 4), EVEN_OK);
  size_t first = stream.length;
  assert_int_equal(even_message_add(&stream, EVEN_MESSAGE_END, NULL, 0, NULL, 0), EVEN_OK);
  for (size_t count = 0; count < first; count++) { /* nothing before it is whole */
    assert_int_equal(even_message_next(bytes_of(&stream), count, &message, &used, &wanted), EVEN_OK);
    assert_int_equal(used, 0);
    assert_int_equal(wanted, count < EVEN_MESSAGE_HEAD ? EVEN_MESSAGE_HEAD : first);
  }
  assert_int_equal(even_message_next(bytes_of(&stream), stream.length, &message, &used, &wanted), EVEN_OK);
  assert_int_equal(used, first);
  assert_int_equal(message.kind, EVEN_MESSAGE_ENDED);
  assert_memory_equal(message.json, "{\"rank\":1}", 10);
  assert_int_equal(message.data_bytes, 4);
  assert_memory_equal(message.data, "\0two", 4);
  assert_int_equal(even_message_next(bytes_of(&stream) + used, stream.length - used, &message, &used, &wanted),
                   EVEN_OK);
  assert_int_equal(message.kind, EVEN_MESSAGE_END);
  even_text_free(&stream);
}

/* A head is enough to refuse: nothing of what it announces is waited for. */
static void what_is_beyond_its_limits_is_refused(void **state) {
  static const unsigned char heads[][EVEN_MESSAGE_HEAD] = {
      {0},                                                  /* no kind */
      {200, 0, 0, 0},                                       /* an unknown one */
      {1, 0, 0, 1},                                         /* one of 2^24 and more */
      {1, 0, 0, 0, 1, 16, 0, 0},                            /* a greeting of 4097 bytes of JSON */
      {1, 0, 0, 0, 0, 0, 0, 0, 1},                          /* a greeting with data */
      {15, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255},        /* a beat of 4 GiB */
      {5, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255}, /* a start of 8 GiB */
  };
  even_message message;
  size_t used = 0;
  size_t wanted = 0;
  (void)state;
  for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
    assert_int_equal(even_message_next(heads[i], EVEN_MESSAGE_HEAD, &message, &used, &wanted), EVEN_ERR_INPUT);
    assert_int_equal(used, 0);
  }
}

static void what_is_too_long_is_not_sent(void **state) {
  static char long_json[5000];
  even_text stream = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_message_add(&stream, EVEN_MESSAGE_GREET, long_json, sizeof long_json, NULL, 0),
                   EVEN_ERR_OVERFLOW);
  assert_int_equal(even_message_add(&stream, EVEN_MESSAGE_BEAT, NULL, 0, long_json, 65), EVEN_ERR_OVERFLOW);
  assert_int_equal(stream.length, 0);
  even_text_free(&stream);
}

static const char START[] =
    "{\"job\":\"abc\",\"attempt\":1,\"max_restarts\":3,\"master_address\":\"10.0.0.1\",\"master_port\":4711,\"world\":"
    "3,"
    "\"first\":1,\"count\":2,\"first_spare\":3,\"spares\":0,\"all_spares\":0,\"group\":1,\"groups\":2,\"most_groups\":"
    "2,\"era\":0,"
    "\"command\":[\"python3\",\"t.py\"],\"environment\":[\"A=b\"],"
    "\"quota\":[null,0.25],\"shown\":[true,false],\"shows_main\":true,\"run_folder\":\"/runs/"
    "a\",\"resume\":null,\"hang_seconds\":30,"
    "\"restart_hung\":false,\"unpinned\":true,\"telemetry\":true,\"rings\":4,\"calls\":false}";

static void a_start_is_read(void **state) {
  even_remote_start start;
  (void)state;
  assert_int_equal(even_remote_start_read(START, sizeof START - 1, &start), EVEN_OK);
  assert_string_equal(start.job, "abc");
  assert_int_equal(start.world, 3);
  assert_int_equal(start.rings, 4);
  assert_string_equal(start.command[1], "t.py");
  assert_null(start.command[2]);
  assert_true(start.quota[0] != start.quota[0] && start.quota[1] != start.quota[1]); /* NAN */
  assert_true(start.quota[2] == 0.25);
  assert_true(!start.shown[0] && start.shown[1] && !start.shown[2] && start.shows_main);
  assert_null(start.resume);
  even_remote_start_free(&start);
}

/* What is refused before a host is reached is what a host would refuse: with a script's name and Python's before them.
 */
static void a_command_of_too_many_words_is_refused_before_it_is_sent(void **state) {
  enum { MOST = 16380, LONG = 1 << 20 };
  static const char *words[MOST + 1];
  static char longs[LONG];
  (void)state;
  for (int i = 0; i <= MOST; i++) {
    words[i] = "x";
  }
  assert_int_equal(even_remote_check_words(words, MOST), EVEN_OK);
  assert_int_equal(even_remote_check_words(words, MOST + 1), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->what, "16381 words"));
  assert_non_null(strstr(even_error_last()->what, "16380 at most"));
  assert_non_null(strstr(even_error_last()->fix, "name a folder"));
  memset(longs, 'x', LONG - 1);
  words[0] = words[1] = longs;
  assert_int_equal(even_remote_check_words(words, 3), EVEN_OK);
  words[2] = longs;
  assert_int_equal(even_remote_check_words(words, 3), EVEN_ERR_USAGE);
  assert_int_equal(even_remote_check_words(NULL, 0), EVEN_OK);

  even_text text = EVEN_TEXT_EMPTY; /* a host takes as many */
  const char *at = strstr(START, "\"python3\"");
  assert_non_null(at);
  even_text_append(&text, START, (size_t)(at - START));
  for (int i = 0; i < MOST + 2; i++) { /* with the two that are there */
    even_text_add(&text, "\"x\",");
  }
  even_text_add(&text, at);
  even_remote_start start;
  assert_int_equal(even_remote_start_read(text.data, text.length, &start), EVEN_OK);
  even_remote_start_free(&start);
  even_text_free(&text);
}

static void replace(const char *text, const char *from, const char *to, char *out, size_t room) {
  const char *at = strstr(text, from);
  assert_non_null(at);
  (void)snprintf(out, room, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
}

/* How often a host looks at its GPUs: as it does by itself, never, each so many seconds. */
static void a_start_says_how_gpus_are_watched(void **state) {
  static const struct {
    const char *said;
    double seconds;
  } cases[] = {{"\"calls\":false", 0},
               {"\"calls\":false,\"gpu_seconds\":null", (double)INFINITY},
               {"\"calls\":false,\"gpu_seconds\":2.5", 2.5}};
  char text[sizeof START + 64];
  even_remote_start start;
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    replace(START, "\"calls\":false", cases[i].said, text, sizeof text);
    assert_int_equal(even_remote_start_read(text, strlen(text), &start), EVEN_OK);
    assert_true(start.gpu_seconds == cases[i].seconds);
    even_remote_start_free(&start);
  }
  static const char *const wrong[] = {"-1", "1e-300", "3601", "1e300"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    char said[64];
    (void)snprintf(said, sizeof said, "\"calls\":false,\"gpu_seconds\":%s", wrong[i]);
    replace(START, "\"calls\":false", said, text, sizeof text);
    assert_int_equal(even_remote_start_read(text, strlen(text), &start), EVEN_ERR_INPUT);
    even_remote_start_free(&start);
  }
}

/* Whom a host asks whether its machine ends soon, and how often: nobody, where that is not said. */
static void a_start_says_who_announces_an_end(void **state) {
  static const struct {
    const char *said;
    const char *from;
    double every;
  } cases[] = {{"\"calls\":false", NULL, 0},
               {"\"calls\":false,\"notice_from\":null,\"notice_every_seconds\":0", NULL, 0},
               {"\"calls\":false,\"notice_from\":\"aws\",\"notice_every_seconds\":0.5", "aws", 0.5}};
  char text[sizeof START + 128];
  even_remote_start start;
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    replace(START, "\"calls\":false", cases[i].said, text, sizeof text);
    assert_int_equal(even_remote_start_read(text, strlen(text), &start), EVEN_OK);
    assert_true(start.notice_every_seconds == cases[i].every);
    assert_int_equal(start.notice_from == NULL, cases[i].from == NULL);
    if (cases[i].from != NULL) {
      assert_string_equal(start.notice_from, cases[i].from);
    }
    even_remote_start_free(&start);
  }
  replace(START, "\"calls\":false", "\"calls\":false,\"notice_every_seconds\":-1", text, sizeof text);
  assert_int_equal(even_remote_start_read(text, strlen(text), &start), EVEN_ERR_INPUT);
  even_remote_start_free(&start);
}

/* Of five places the last two are spares', of which one is the host's: its quota comes after its ranks'. */
static void a_start_with_spares_is_read(void **state) {
  char one[sizeof START + 64];
  char two[sizeof START + 64];
  even_remote_start start;
  (void)state;
  replace(START, "\"world\":3", "\"world\":5", one, sizeof one);
  replace(one, "\"first_spare\":3,\"spares\":0,\"all_spares\":0", "\"first_spare\":4,\"spares\":1,\"all_spares\":2",
          two, sizeof two);
  replace(two, "\"rings\":4", "\"rings\":5", one, sizeof one);
  replace(one, "[null,0.25]", "[null,0.25,0.5]", two, sizeof two);
  replace(two, "[true,false]", "[true,false,true]", one, sizeof one);
  assert_int_equal(even_remote_start_read(one, strlen(one), &start), EVEN_OK);
  assert_int_equal(start.first_spare, 4);
  assert_int_equal(start.spares, 1);
  assert_int_equal(start.all_spares, 2);
  assert_true(start.quota[2] == 0.25 && start.quota[4] == 0.5 && start.quota[3] != start.quota[3]);
  assert_true(start.shown[4] && !start.shown[3]);
  even_remote_start_free(&start);
}

/* It joins an attempt that began with one rank: its places, 1 and 2, were kept for it. */
static void a_start_of_a_host_that_joins_is_read(void **state) {
  char one[sizeof START + 64];
  char two[sizeof START + 64];
  even_remote_start start;
  (void)state;
  replace(START, "\"all_spares\":0", "\"all_spares\":2", one, sizeof one);
  assert_int_equal(even_remote_start_read(one, strlen(one), &start), EVEN_ERR_INPUT);
  even_remote_start_free(&start);
  replace(one, "\"era\":0", "\"era\":0,\"late\":true", two, sizeof two);
  assert_int_equal(even_remote_start_read(two, strlen(two), &start), EVEN_OK);
  assert_true(start.late && start.first == 1 && start.count == 2 && start.all_spares == 2);
  even_remote_start_free(&start);
}

/* Which of its devices a host uses, where some are set aside. */
static void a_start_without_some_devices_is_read(void **state) {
  static const struct {
    const char *devices;
    even_status status;
  } cases[] = {
      {"[0,2]", EVEN_OK},           {"[1,2]", EVEN_OK},          {"[0]", EVEN_ERR_INPUT},
      {"[0,1,2]", EVEN_ERR_INPUT},  {"[2,0]", EVEN_ERR_INPUT},   {"[1,1]", EVEN_ERR_INPUT},
      {"[-1,1]", EVEN_ERR_INPUT},   {"[0,1.5]", EVEN_ERR_INPUT}, {"[0,99999]", EVEN_ERR_INPUT},
      {"[0,null]", EVEN_ERR_INPUT}, {"3", EVEN_ERR_INPUT},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_remote_start start;
    char to[64];
    char text[sizeof START + 64];
    (void)snprintf(to, sizeof to, "\"era\":0,\"devices\":%s", cases[i].devices);
    replace(START, "\"era\":0", to, text, sizeof text);
    assert_int_equal(even_remote_start_read(text, strlen(text), &start), cases[i].status);
    if (cases[i].status == EVEN_OK) {
      assert_int_equal(start.used[0], cases[i].devices[1] - '0');
      assert_int_equal(start.used[1], 2);
    }
    even_remote_start_free(&start);
  }
}

/* Whatever does not fit is refused as a whole, with its name, and nothing is left of it. */
static void a_start_that_does_not_fit_is_refused(void **state) {
  static const char *const wrong[][2] = {
      {"\"first\":1", "\"first\":2"},
      {"\"first\":1", "\"first\":-1"},
      {"\"count\":2", "\"count\":3"},
      {"\"group\":1", "\"group\":2"},
      {"\"all_spares\":0", "\"all_spares\":2"},
      {"\"spares\":0", "\"spares\":1"},
      {"\"first_spare\":3", "\"first_spare\":2"},
      {"\"first_spare\":3", "\"first_spare\":4"},
      {"\"world\":3", "\"world\":5000"},
      {"[\"python3\",\"t.py\"]", "[]"},
      {"[\"python3\",\"t.py\"]", "[1]"},
      {"[null,0.25]", "[null]"},
      {"[null,0.25]", "[null,7]"},
      {"\"/runs/a\"", "\"runs/a\""},
      {"\"/runs/a\"", "null"},
      {"\"attempt\":1", "\"attempt\":\"1\""},
      {"\"job\":\"abc\"", "\"job\":\"\""},
      {"\"resume\":null", "\"resume\":\"there\""},
      {"4711", "0"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    even_remote_start start;
    char text[sizeof START + 64];
    replace(START, wrong[i][0], wrong[i][1], text, sizeof text);
    assert_int_equal(even_remote_start_read(text, strlen(text), &start), EVEN_ERR_INPUT);
    even_remote_start_free(&start);
  }
}

static void lack_of_memory_leaves_nothing(void **state) {
  (void)state;
  for (int n = 1; n < 40; n++) {
    even_remote_start start;
    fault_allocation(n);
    even_status status = even_remote_start_read(START, sizeof START - 1, &start);
    fault_reset();
    assert_true(status == EVEN_OK || status == EVEN_ERR_MEMORY);
    even_remote_start_free(&start);
  }
}

static void what_is_a_ranks_own_stays_here(void **state) {
  (void)state;
  assert_true(even_remote_passes_on("EVENSTEP_COMPRESSION=bf16"));
  assert_true(even_remote_passes_on("OMP_NUM_THREADS=2"));
  assert_true(even_remote_passes_on("PYTHONPATH=/x"));
  assert_false(even_remote_passes_on("HOME=/root"));
  assert_false(even_remote_passes_on("CUDA_VISIBLE_DEVICES=0"));
  assert_false(even_remote_passes_on("EVENSTEP_HOST_ID=a"));
  assert_false(even_remote_passes_on("EVENSTEP_CHAOS_NAN=/proc/7/fd/5")); /* of this host's processes */
  assert_false(even_remote_passes_on("EVENSTEP_TELEMETRY_FD=5"));
  assert_false(even_remote_passes_on("EVENSTEP_AGENT=x-1"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(comes_out_as_it_went_in),
      cmocka_unit_test(what_is_beyond_its_limits_is_refused),
      cmocka_unit_test(what_is_too_long_is_not_sent),
      cmocka_unit_test(a_start_is_read),
      cmocka_unit_test(a_command_of_too_many_words_is_refused_before_it_is_sent),
      cmocka_unit_test(a_start_says_how_gpus_are_watched),
      cmocka_unit_test(a_start_says_who_announces_an_end),
      cmocka_unit_test(a_start_with_spares_is_read),
      cmocka_unit_test(a_start_of_a_host_that_joins_is_read),
      cmocka_unit_test(a_start_without_some_devices_is_read),
      cmocka_unit_test(a_start_that_does_not_fit_is_refused),
      cmocka_unit_test(lack_of_memory_leaves_nothing),
      cmocka_unit_test(what_is_a_ranks_own_stays_here),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
