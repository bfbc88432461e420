/* The table of costs: what it learns, what it answers, what it keeps in a file and what it refuses to read from one. */
#include "base/fail.h"
#include "comm/costs.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const char shape[] = "2+2 ranks, \"Xeon\" x 8, ucx 1.13.1 eth0";
static char folder[] = "/tmp/evenstep-costs-XXXXXX";
static char path[64];

static even_comm_cost_key key_of(uint64_t bytes) {
  return (even_comm_cost_key){
      .collective = "all_reduce", .shape = shape, .engine = "ucx", .way = "whole", .bytes = bytes};
}

static even_comm_costs *table(void) {
  even_comm_costs *costs = NULL;
  assert_int_equal(even_comm_costs_open(&costs), EVEN_OK);
  return costs;
}

static void add(even_comm_costs *costs, uint64_t bytes, double seconds) {
  even_comm_cost_key key = key_of(bytes);
  assert_int_equal(even_comm_costs_add(costs, &key, seconds), EVEN_OK);
}

static double found(even_comm_costs *costs, uint64_t bytes) {
  even_comm_cost_key key = key_of(bytes);
  double seconds = -1;
  return even_comm_costs_find(costs, &key, &seconds) ? seconds : -1;
}

static void near(double value, double wanted, double part) {
  if (!(fabs(value / wanted - 1) <= part)) {
    fail_msg("%g is not near %g", value, wanted);
  }
}

/* ---- learning ---- */

static void the_first_sample_counts_and_later_ones_refine(void **state) {
  even_comm_costs *costs = table();
  even_comm_cost cost;
  (void)state;
  assert_true(found(costs, 1024) < 0);
  add(costs, 1024, 1e-5);
  near(found(costs, 1024), 1e-5, 1e-9);
  add(costs, 1024, 2e-5);
  near(found(costs, 1024), 1e-5 * sqrt(2), 1e-9);
  assert_true(even_comm_costs_at(costs, 0, &cost));
  assert_int_equal(cost.samples, 2);
  assert_int_equal(cost.bytes, 1024);
  assert_int_equal(cost.at, 0);
  assert_string_equal(cost.shape, shape);
  assert_false(even_comm_costs_at(costs, 1, &cost));
  even_comm_costs_close(costs);
}

static void a_held_up_call_is_as_good_as_forgotten(void **state) {
  even_comm_costs *costs = table();
  (void)state;
  for (int i = 0; i < 8; i++) {
    add(costs, 4096, 3e-5);
  }
  add(costs, 4096, 3.0);
  near(found(costs, 4096), 3e-5, 0.09);
  even_comm_costs_close(costs);
}

static void a_lasting_change_is_learnt(void **state) {
  even_comm_costs *costs = table();
  (void)state;
  for (int i = 0; i < 1000; i++) {
    add(costs, 4096, 3e-5);
  }
  for (int i = 0; i < 120; i++) {
    add(costs, 4096, 3e-4);
  }
  near(found(costs, 4096), 3e-4, 0.1);
  for (int i = 0; i < 120; i++) {
    add(costs, 4096, 1e-5);
  }
  near(found(costs, 4096), 1e-5, 0.1);
  even_comm_costs_close(costs);
}

static void what_lies_between_is_interpolated(void **state) {
  even_comm_costs *costs = table();
  even_comm_cost_key other = key_of(4096);
  double seconds = 0;
  (void)state;
  add(costs, 1024, 1e-5);
  add(costs, 65536, 8e-5);
  near(found(costs, 8192), 1e-5 * sqrt(8), 1e-9); /* half way: 1 K and 64 K are 64 apart, the costs 8 */
  near(found(costs, 1), 1e-5, 1e-9);
  near(found(costs, 655360), 8e-4, 1e-9);
  add(costs, 1500, 1e-5); /* nearer to 2048 than to 1024 */
  near(found(costs, 2048), 1e-5, 1e-9);
  other.way = "parts";
  assert_false(even_comm_costs_find(costs, &other, &seconds));
  other = key_of(4096);
  other.shape = "another";
  assert_false(even_comm_costs_find(costs, &other, &seconds));
  even_comm_costs_close(costs);
}

static void what_is_no_cost_is_refused(void **state) {
  static const char long_word[] = "a name that is longer than any name of a way";
  even_comm_costs *costs = table();
  even_comm_cost_key key = key_of(8);
  (void)state;
  assert_int_equal(even_comm_costs_add(costs, &key, 0), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_costs_add(costs, &key, NAN), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_costs_add(costs, &key, INFINITY), EVEN_ERR_ARGUMENT);
  key.bytes = 0;
  assert_int_equal(even_comm_costs_add(costs, &key, 1), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "0 bytes"));
  key = key_of(8);
  key.way = long_word;
  assert_int_equal(even_comm_costs_add(costs, &key, 1), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "the way of a cost has 44 bytes"));
  key.way = "two\nlines";
  assert_int_equal(even_comm_costs_add(costs, &key, 1), EVEN_ERR_ARGUMENT);
  key.way = "\xff";
  assert_int_equal(even_comm_costs_add(costs, &key, 1), EVEN_ERR_ARGUMENT);
  key.way = NULL;
  assert_int_equal(even_comm_costs_add(costs, &key, 1), EVEN_ERR_ARGUMENT);
  even_comm_cost cost;
  assert_false(even_comm_costs_at(costs, 0, &cost));
  even_comm_costs_close(costs);
  even_comm_costs_close(NULL);
}

static void a_full_table_loses_the_stalest(void **state) {
  even_comm_costs *costs = table();
  char words[32];
  (void)state;
  add(costs, 1024, 1e-5);
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_OK);
  for (int i = 0; i < EVEN_COMM_COSTS_MOST; i++) {
    even_comm_cost_key key = key_of(8);
    (void)snprintf(words, sizeof words, "shape %d", i);
    key.shape = words;
    assert_int_equal(even_comm_costs_add(costs, &key, 1), EVEN_OK);
  }
  assert_true(found(costs, 1024) < 0); /* the only one that a file has */
  even_comm_cost cost;
  assert_true(even_comm_costs_at(costs, EVEN_COMM_COSTS_MOST - 1, &cost));
  assert_false(even_comm_costs_at(costs, EVEN_COMM_COSTS_MOST, &cost));
  even_comm_costs_close(costs);
  assert_int_equal(unlink(path), 0);
}

/* ---- the file ---- */

static void a_table_comes_back_from_its_file(void **state) {
  even_comm_costs *costs = table();
  even_comm_costs *again = table();
  even_comm_cost cost;
  (void)state;
  assert_int_equal(even_comm_costs_load(costs, path), EVEN_OK); /* there is none */
  add(costs, 1024, 1.25e-5);
  add(costs, 1024, 1.25e-5);
  add(costs, 1 << 20, 3.5e-3);
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_OK);
  assert_int_equal(even_comm_costs_load(again, path), EVEN_OK);
  near(found(again, 1024), 1.25e-5, 1e-9);
  near(found(again, 1 << 20), 3.5e-3, 1e-9);
  assert_true(even_comm_costs_at(again, 0, &cost));
  assert_int_equal(cost.samples, 2);
  assert_true(cost.at > 1700000000);
  assert_string_equal(cost.shape, shape);
  assert_int_equal(even_comm_costs_save(again, path), EVEN_OK); /* nothing new */
  add(again, 1024, 1.25e-5);
  assert_int_equal(even_comm_costs_save(again, path), EVEN_OK);
  even_comm_costs_close(again);
  again = table();
  assert_int_equal(even_comm_costs_load(again, path), EVEN_OK);
  assert_true(even_comm_costs_at(again, 0, &cost));
  assert_int_equal(cost.samples, 3); /* the new sample once, not all that the table knew */
  even_comm_costs_close(again);
  even_comm_costs_close(costs);
}

static void old_costs_are_forgotten(void **state) {
  static const char text[] =
      "{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"collective\":\"all_reduce\",\"bytes\":1024,\"engine\":"
      "\"ucx\",\"way\":\"whole\",\"ns\":5,\"samples\":1,\"at\":1000,\"later\":[],\"shape\":\"s\"}]}";
  even_comm_costs *costs = table();
  even_comm_cost cost;
  (void)state;
  assert_int_equal(even_comm_costs_read(costs, "text", text, strlen(text), 1001), EVEN_OK);
  assert_false(even_comm_costs_at(costs, 0, &cost));
  assert_int_equal(even_comm_costs_read(costs, "text", text, strlen(text), 1000), EVEN_OK);
  assert_true(even_comm_costs_at(costs, 0, &cost));
  even_comm_costs_close(costs);
}

static void damaged_files_are_refused_with_the_place(void **state) {
  static const struct {
    const char *text;
    const char *said;
  } damaged[] = {
      {"", "is empty"},
      {"[]", "no object begins"},
      {"{\"format\": \"evenstep-comm-costs-1\", \"costs\": [{\"collective\": \"all_red", "a string without an end"},
      {"{}", "its format is missing"},
      {"{\"format\":7,\"costs\":[]}", "its format is no short text"},
      {"{\"format\":\"evenstep-profile-1\"}", "its format is evenstep-profile-1, not evenstep-comm-costs-1"},
      {"{\"format\":\"evenstep-comm-costs-1\"}", "has no list of costs"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":{}}", "has no list of costs"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[3]}", "cost 1: it is no object"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{}]}", "cost 1: it has no \"collective\""},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"collective\":\"\"}]}", "its \"collective\" is no text"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"ns\":-1}]}", "cost 1: its \"ns\" is no whole number"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"ns\":1.5}]}", "its \"ns\" is no whole number"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"bytes\":0}]}", "its \"bytes\" is no whole number"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"bytes\":1e300}]}", "its \"bytes\" is no whole number"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"samples\":\"1\"}]}", "its \"samples\" is no whole number"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"at\":-5}]}", "its \"at\" is no whole number"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"way\":\"a name that is longer than any name of a way\"}]}",
       "its \"way\" is no text of 1 to 31 bytes"},
      {"{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"collective\":\"a\\u0007b\",\"bytes\":1,\"engine\":\"e\","
       "\"way\":\"w\",\"ns\":1,\"samples\":1,\"at\":1,\"shape\":\"s\"}]}",
       "cost 1: the collective of a cost has a control character"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
    even_comm_costs *costs = table();
    even_comm_cost cost;
    even_text after = EVEN_TEXT_EMPTY;
    assert_int_equal(even_file_replace(path, damaged[i].text, strlen(damaged[i].text)), EVEN_OK);
    assert_int_equal(even_comm_costs_load(costs, path), EVEN_ERR_INPUT);
    if (strstr(even_error_last()->what, damaged[i].said) == NULL || strstr(even_error_last()->what, path) == NULL) {
      fail_msg("%s\n%s", damaged[i].said, even_error_last()->what);
    }
    assert_non_null(strstr(even_error_last()->fix, "EVENSTEP_COMM_COSTS"));
    assert_false(even_comm_costs_at(costs, 0, &cost));
    add(costs, 8, 1);
    assert_int_equal(even_comm_costs_save(costs, path), EVEN_ERR_INPUT); /* what is not ours stays */
    assert_int_equal(even_file_read(path, 1 << 20, &after), EVEN_OK);
    assert_string_equal(even_text_string(&after), damaged[i].text);
    even_text_free(&after);
    even_comm_costs_close(costs);
  }
  assert_int_equal(unlink(path), 0);
}

static void one_bad_cost_and_none_is_taken(void **state) {
  static const char text[] =
      "{\"format\":\"evenstep-comm-costs-1\",\"costs\":[{\"collective\":\"all_reduce\",\"bytes\":1024,\"engine\":"
      "\"ucx\",\"way\":\"whole\",\"ns\":5,\"samples\":1,\"at\":1000,\"shape\":\"s\"},{\"collective\":\"broadcast\"}]}";
  even_comm_costs *costs = table();
  even_comm_cost cost;
  (void)state;
  assert_int_equal(even_comm_costs_read(costs, "text", text, strlen(text), 0), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "text: cost 2: it has no \"bytes\""));
  assert_false(even_comm_costs_at(costs, 0, &cost));
  assert_int_equal(even_comm_costs_read(costs, "text", "{}\0{}", 5, 0), EVEN_ERR_INPUT);
  even_comm_costs_close(costs);
}

/* Processes that save at the same time lose nothing and leave nothing behind. */
#define WRITERS 4
#define ROUNDS 10

static int write_often(int writer) {
  even_comm_costs *costs = NULL;
  char way[16];
  even_comm_cost_key key = key_of(1024);
  (void)snprintf(way, sizeof way, "way %d", writer);
  key.way = way;
  if (even_comm_costs_open(&costs) != EVEN_OK) {
    return 1;
  }
  for (int round = 0; round < ROUNDS; round++) {
    even_status status = even_comm_costs_add(costs, &key, 1e-5);
    key.bytes = (uint64_t)1024 << round;
    status = status == EVEN_OK ? even_comm_costs_add(costs, &key, 1e-5) : status;
    status = status == EVEN_OK ? even_comm_costs_save(costs, path) : status;
    while (status == EVEN_ERR_IN_USE) { /* a machine this slow: take turns on */
      status = even_comm_costs_save(costs, path);
    }
    if (status != EVEN_OK) {
      (void)fprintf(stderr, "writer %d: %s\n", writer, even_error_last()->what);
      return 1;
    }
  }
  even_comm_costs_close(costs);
  return 0;
}

static size_t written_by_several(bool locks) {
  pid_t writers[WRITERS];
  even_comm_costs *costs = table();
  even_names names = {0};
  even_comm_cost cost;
  size_t samples = 0;
  for (int i = 0; i < WRITERS; i++) {
    writers[i] = fork();
    if (writers[i] == 0) {
      if (!locks) {
        fault_os_from(FAULT_flock, 1, ENOLCK);
      }
      _exit(write_often(i));
    }
  }
  for (int i = 0; i < WRITERS; i++) {
    int status = 1;
    assert_int_equal(waitpid(writers[i], &status, 0), writers[i]);
    assert_int_equal(status, 0);
  }
  assert_int_equal(even_comm_costs_load(costs, path), EVEN_OK);
  for (size_t i = 0; even_comm_costs_at(costs, i, &cost); i++) {
    samples += cost.samples;
  }
  assert_int_equal(even_folder_names(folder, &names), EVEN_OK);
  assert_int_equal(names.count, 1);
  even_names_free(&names);
  even_comm_costs_close(costs);
  assert_int_equal(unlink(path), 0);
  return samples;
}

static void several_writers_at_once(void **state) {
  (void)state;
  assert_int_equal(written_by_several(true), (size_t)2 * WRITERS * ROUNDS);
  assert_true(written_by_several(false) > 0); /* samples may be lost, but the file is whole */
}

static void a_folder_that_stays_locked(void **state) {
  even_comm_costs *costs = table();
  int fd = -1;
  (void)state;
  add(costs, 8, 1);
  assert_int_equal(even_folder_lock(folder, &fd), EVEN_OK);
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_ERR_IN_USE);
  even_folder_unlock(fd);
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_OK); /* nothing was lost */
  assert_int_equal(unlink(path), 0);
  even_comm_costs_close(costs);
}

static void a_place_that_cannot_be_written(void **state) {
  even_comm_costs *costs = table();
  (void)state;
  add(costs, 8, 1);
  assert_int_not_equal(even_comm_costs_save(costs, "/proc/no/such/costs.json"), EVEN_OK);
  fault_os_from(FAULT_flock, 1, ENOLCK); /* a file system without locks */
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_OK);
  add(costs, 8, 1);
  fault_os(FAULT_rename, 2, EIO); /* of the process's own file to the common name */
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_ERR_SYSTEM);
  assert_int_equal(even_comm_costs_save(costs, path), EVEN_OK);
  fault_reset();
  even_names names = {0};
  assert_int_equal(even_folder_names(folder, &names), EVEN_OK);
  assert_int_equal(names.count, 1);
  even_names_free(&names);
  assert_int_equal(unlink(path), 0);
  even_comm_costs_close(costs);
}

/* ---- faults ---- */

static even_status whole_life(void *context) {
  even_comm_costs *costs = NULL;
  even_comm_cost_key key = key_of(1024);
  (void)context;
  EVEN_TRY(even_comm_costs_open(&costs));
  even_status status = even_comm_costs_load(costs, path);
  for (int i = 0; i < 70 && status == EVEN_OK; i++) {
    key.bytes = (uint64_t)1 << (i % 50);
    key.way = i < 50 ? "a" : "b";
    status = even_comm_costs_add(costs, &key, 1e-3);
  }
  status = status == EVEN_OK ? even_comm_costs_save(costs, path) : status;
  even_comm_costs_close(costs);
  return status;
}

static void memory_and_files_that_fail(void **state) {
  even_comm_costs *costs = table();
  (void)state;
  assert_int_equal(whole_life(NULL), EVEN_OK);
  assert_true(fault_each_allocation(whole_life, NULL) >= 5);
  assert_true(fault_each_os(whole_life, NULL, EIO) >= 5);
  assert_int_equal(even_comm_costs_load(costs, path), EVEN_OK); /* whole after all of that */
  even_comm_costs_close(costs);
  assert_int_equal(unlink(path), 0);
}

static int make_folder(void **state) {
  (void)state;
  if (mkdtemp(folder) == NULL) {
    return -1;
  }
  (void)snprintf(path, sizeof path, "%s/costs.json", folder);
  return 0;
}

static int remove_folder(void **state) {
  (void)state;
  fault_reset();
  (void)unlink(path);
  return rmdir(folder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_first_sample_counts_and_later_ones_refine),
      cmocka_unit_test(a_held_up_call_is_as_good_as_forgotten),
      cmocka_unit_test(a_lasting_change_is_learnt),
      cmocka_unit_test(what_lies_between_is_interpolated),
      cmocka_unit_test(what_is_no_cost_is_refused),
      cmocka_unit_test(a_full_table_loses_the_stalest),
      cmocka_unit_test(a_table_comes_back_from_its_file),
      cmocka_unit_test(old_costs_are_forgotten),
      cmocka_unit_test(damaged_files_are_refused_with_the_place),
      cmocka_unit_test(one_bad_cost_and_none_is_taken),
      cmocka_unit_test(several_writers_at_once),
      cmocka_unit_test(a_folder_that_stays_locked),
      cmocka_unit_test(a_place_that_cannot_be_written),
      cmocka_unit_test(memory_and_files_that_fail),
  };
  return cmocka_run_group_tests_name("comm_costs", tests, make_folder, remove_folder);
}
