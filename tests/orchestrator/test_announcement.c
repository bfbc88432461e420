/* What metadata services answer, in the words of their documentation, and what they do not; and who may be asked. */
#include "orchestrator/announcement.h"

#include "base/fail.h"
#include "orchestrator/notice_place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void instants_are_read_in_both_forms(void **state) {
  static const struct {
    const char *text;
    int64_t at; /* < 0: none */
  } cases[] = {
      {"1970-01-01T00:00:00Z", 0},
      {"2017-09-18T08:22:00Z", 1505722920},
      {"2024-02-29T23:59:59.123Z", 1709251199},
      {"Mon, 19 Sep 2016 18:29:47 GMT", 1474309787},
      {"Thu, 01 Jan 1970 00:00:00 GMT", 0},
      {"Fri, 31 Dec 9999 23:59:59 GMT", 253402300799},
      {"", -1},
      {"2017-09-18T08:22:00", -1},
      {"2017-13-18T08:22:00Z", -1},
      {"2017-09-18T24:22:00Z", -1},
      {"1969-09-18T08:22:00Z", -1},
      {"2017-09-18T08:22:00Zx", -1},
      {"2017-09-18T08:22:0", -1},
      {"Mon, 19 Foo 2016 18:29:47 GMT", -1},
      {"Mon, 19 Sep 2016 18:29:47 CET", -1},
      {"Mon, 19 Sep 16 18:29:47 GMT  ", -1},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int64_t at = -1;
    assert_int_equal(even_announcement_instant(cases[i].text, &at), cases[i].at >= 0);
    if (cases[i].at >= 0) {
      assert_true(at == cases[i].at);
    }
  }
}

static even_status aws(int status, const char *body, even_announcement *out) {
  return even_announcement_of_aws(status, body, strlen(body), out);
}

static void amazon_names_action_and_time(void **state) {
  even_announcement found;
  (void)state;
  assert_int_equal(aws(404, "<html>not found</html>", &found), EVEN_OK);
  assert_false(found.due);
  assert_int_equal(aws(200, "{\"action\": \"terminate\", \"time\": \"2017-09-18T08:22:00Z\"}", &found), EVEN_OK);
  assert_true(found.due && found.at == 1505722920 && found.seconds < 0);
  assert_string_equal(found.what, "terminate");
  assert_int_equal(aws(200, "{\"action\": \"hibernate\\u001b[2J\"}", &found), EVEN_OK);
  assert_true(found.due && found.at == 0);
  assert_string_equal(found.what, "hibernate?[2J"); /* fit for a terminal */
  assert_int_equal(aws(200, "{\"time\": \"2017-09-18T08:22:00Z\"}", &found), EVEN_ERR_INPUT);
  assert_int_equal(aws(200, "{\"action\": 5}", &found), EVEN_ERR_INPUT);
  assert_int_equal(aws(200, "[1]", &found), EVEN_ERR_INPUT);
  assert_int_equal(aws(200, "", &found), EVEN_ERR_INPUT);
  assert_int_equal(aws(500, "", &found), EVEN_ERR_INPUT);
  const char *recommended = "{\"noticeTime\": \"2020-10-27T08:22:00Z\"}";
  assert_int_equal(even_announcement_of_aws_rebalance(200, recommended, strlen(recommended), &found), EVEN_OK);
  assert_true(found.due && found.at == 0 && found.seconds < 0); /* the time is that of the notice */
}

static void google_says_true_or_false(void **state) {
  even_announcement found;
  (void)state;
  assert_int_equal(even_announcement_of_gcp(200, "FALSE", 5, &found), EVEN_OK);
  assert_false(found.due);
  assert_int_equal(even_announcement_of_gcp(200, "TRUE\n", 5, &found), EVEN_OK);
  assert_true(found.due && found.seconds > 29 && found.seconds < 31);
  assert_int_equal(even_announcement_of_gcp(200, "TRUE\0x", 6, &found), EVEN_ERR_INPUT);
  assert_int_equal(even_announcement_of_gcp(200, "maybe", 5, &found), EVEN_ERR_INPUT);
  assert_int_equal(even_announcement_of_gcp(404, "FALSE", 5, &found), EVEN_ERR_INPUT);
}

/* One event of scheduledevents. */
#define EVENT(type, status, resources, before)                                                   \
  "{\"EventId\":\"1\",\"EventStatus\":\"" status "\",\"EventType\":\"" type                      \
  "\",\"ResourceType\":\"VirtualMachine\",\"Resources\":[" resources "],\"NotBefore\":\"" before \
  "\",\"Description\":"                                                                          \
  "\"x\",\"EventSource\":\"Platform\",\"DurationInSeconds\":-1}"
#define EVENTS(list) "{\"DocumentIncarnation\":2,\"Events\":[" list "]}"
#define LATER "Mon, 19 Sep 2016 18:29:47 GMT"
#define SOONER "Mon, 19 Sep 2016 18:00:00 GMT"

static void azure_lists_events_of_many_machines(void **state) {
  static const struct {
    const char *body;
    const char *what; /* NULL: nothing */
    int64_t at;
  } cases[] = {
      {EVENTS(""), NULL, 0},
      {EVENTS(EVENT("Preempt", "Scheduled", "\"vm_1\",\"VM_0\"", LATER)), "Preempt", 1474309787},
      {EVENTS(EVENT("Preempt", "Scheduled", "\"vm_1\"", LATER)), NULL, 0},
      {EVENTS(EVENT("Freeze", "Scheduled", "\"vm_0\"", LATER)), NULL, 0},
      {EVENTS(EVENT("Terminate", "Started", "\"vm_0\"", "")), "Terminate", 0},
      {EVENTS(EVENT("Reboot", "Scheduled", "\"vm_0\"", LATER)), "Reboot", 1474309787},
      {EVENTS(EVENT("Redeploy", "Started", "\"vm_0\"", "")), NULL, 0},
      {EVENTS(EVENT("Preempt", "Canceled", "\"vm_0\"", LATER)), NULL, 0},
      {EVENTS(EVENT("Preempt", "Scheduled", "7,null", LATER)), NULL, 0},
      {EVENTS("1,null,{}"), NULL, 0},
      {EVENTS(EVENT("Reboot", "Scheduled", "\"vm_0\"", LATER) "," EVENT("Preempt", "Scheduled", "\"vm_0\"", SOONER)),
       "Preempt", 1474308000},
      {EVENTS(EVENT("Preempt", "Scheduled", "\"vm_0\"", SOONER) "," EVENT("Reboot", "Scheduled", "\"vm_0\"", LATER)),
       "Preempt", 1474308000},
      {EVENTS(EVENT("Preempt", "Scheduled", "\"vm_0\"", SOONER) "," EVENT("Terminate", "Started", "\"vm_0\"", "")),
       "Terminate", 0},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_announcement found;
    assert_int_equal(even_announcement_of_azure(200, cases[i].body, strlen(cases[i].body), "vm_0", &found), EVEN_OK);
    assert_int_equal(found.due, cases[i].what != NULL);
    assert_true(found.at == cases[i].at && found.seconds < 0);
    assert_string_equal(found.what, cases[i].what == NULL ? "" : cases[i].what);
  }
}

static void azure_is_not_believed_without_events(void **state) {
  static const char *const bad[] = {"", "{}", "[]", "{\"Events\":{}}", "{\"Events\":[", "null"};
  even_announcement found;
  (void)state;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    assert_int_equal(even_announcement_of_azure(200, bad[i], strlen(bad[i]), "vm_0", &found), EVEN_ERR_INPUT);
    assert_false(found.due);
  }
  assert_int_equal(even_announcement_of_azure(400, EVENTS(""), strlen(EVENTS("")), "vm_0", &found), EVEN_ERR_INPUT);
}

static void ones_own_address_says_yes_no_or_seconds(void **state) {
  static const struct {
    int status;
    const char *body;
    double seconds; /* of notice; -1: it does not say, -2: there is none */
  } cases[] = {{204, "", -2},      {404, "gone", -2},  {200, "", -2},       {200, " No\r\n", -2}, {200, "0", -2},
               {200, "FALSE", -2}, {200, "none", -2},  {200, "yes", -1},    {200, "45\n", 45},    {200, "2.5s", 2.5},
               {200, "-3", -1},    {200, "1e300", -1}, {200, "5 beans", -1}};
  even_announcement found;
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(even_announcement_of_text(cases[i].status, cases[i].body, strlen(cases[i].body), &found), EVEN_OK);
    assert_int_equal(found.due, cases[i].seconds > -2);
    if (found.due) {
      assert_true(found.seconds >= cases[i].seconds && found.seconds <= cases[i].seconds);
    }
  }
  assert_int_equal(even_announcement_of_text(503, "", 0, &found), EVEN_ERR_INPUT);
  even_announcement_of_command("12\n", 3, &found);
  assert_true(found.due && found.seconds > 11 && found.seconds < 13);
  even_announcement_of_command("", 0, &found);
  assert_true(found.due && found.seconds < 0);
  static const char *const none[] = {"0\n", "false\r\n", "No", " none "};
  for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
    even_announcement_of_command(none[i], strlen(none[i]), &found);
    assert_false(found.due);
  }
}

static void places_are_named(void **state) {
  static const struct {
    const char *text;
    even_notice_service service;
    const char *address;
    int port;
    const char *rest;
    const char *name;
  } cases[] = {
      {"off", EVEN_NOTICE_OFF, "", 0, "", "off"},
      {"auto", EVEN_NOTICE_AUTO, "169.254.169.254", 80, "", "auto"},
      {"aws", EVEN_NOTICE_AWS, "169.254.169.254", 80, "", "aws"},
      {"aws+rebalance=127.0.0.1:1338", EVEN_NOTICE_AWS, "127.0.0.1", 1338, "", "aws+rebalance"},
      {"gcp=10.0.0.1", EVEN_NOTICE_GCP, "10.0.0.1", 80, "", "gcp"},
      {"azure=localhost:65535", EVEN_NOTICE_AZURE, "127.0.0.1", 65535, "", "azure"},
      {"http://127.0.0.1:8000/a?b=c", EVEN_NOTICE_URL, "127.0.0.1", 8000, "/a?b=c", "http://127.0.0.1:8000"},
      {"http://127.0.0.1", EVEN_NOTICE_URL, "127.0.0.1", 80, "/", "http://127.0.0.1:80"},
      {"exec:test -e /tmp/x y", EVEN_NOTICE_EXEC, "", 0, "test -e /tmp/x y", "exec"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_notice_place place;
    char room[64];
    assert_int_equal(even_notice_place_read(cases[i].text, &place), EVEN_OK);
    assert_int_equal(place.service, cases[i].service);
    assert_int_equal(place.rebalance, strstr(cases[i].text, "rebalance") != NULL);
    assert_string_equal(place.address, cases[i].address);
    assert_int_equal(place.port, cases[i].port);
    assert_string_equal(place.text, cases[i].rest);
    assert_string_equal(even_notice_place_name(&place, room), cases[i].name);
  }
}

static void what_is_no_place_is_refused_with_a_fix(void **state) {
  static const char *const bad[] = {"",
                                    "ec2",
                                    "aws=",
                                    "aws=host",
                                    "aws=127.0.0.1:0",
                                    "aws=127.0.0.1:65536",
                                    "aws=127.0.0.1:",
                                    "gcp+rebalance",
                                    "http://",
                                    "http://metadata.google.internal/",
                                    "http://127.0.0.1:80x/",
                                    "http://127.0.0.1/a b",
                                    "http://127.0.0.1/a\r\nX: y",
                                    "http://127.0.0.1?x",
                                    "http://user@127.0.0.1/",
                                    "https://127.0.0.1/",
                                    "exec:",
                                    "off=127.0.0.1",
                                    "http://1.2.3.4.5.6.7.8.9/",
                                    "http://127.0.0.1:80a00000000/"};
  char long_one[EVEN_NOTICE_TEXT + 8];
  even_notice_place place;
  (void)state;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    assert_int_equal(even_notice_place_read(bad[i], &place), EVEN_ERR_USAGE);
    assert_string_not_equal(even_error_last()->fix, "");
  }
  memset(long_one, 'x', sizeof long_one);
  memcpy(long_one, "exec:", 5);
  long_one[sizeof long_one - 1] = '\0';
  assert_int_equal(even_notice_place_read(long_one, &place), EVEN_ERR_USAGE);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(instants_are_read_in_both_forms),
      cmocka_unit_test(amazon_names_action_and_time),
      cmocka_unit_test(google_says_true_or_false),
      cmocka_unit_test(azure_lists_events_of_many_machines),
      cmocka_unit_test(azure_is_not_believed_without_events),
      cmocka_unit_test(ones_own_address_says_yes_no_or_seconds),
      cmocka_unit_test(places_are_named),
      cmocka_unit_test(what_is_no_place_is_refused_with_a_fix),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
