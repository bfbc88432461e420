/* The answers of metadata services, one by one. */
#include "orchestrator/announcement.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MOST_WORD = 64 };

static const double GCP_SECONDS = 30;
static const double MOST_SECONDS = 1e6;

static void say(even_announcement *out, const char *what) {
  out->due = true;
  (void)even_utf8_clean(what, out->what, sizeof out->what);
}

static void nothing(even_announcement *out) {
  *out = (even_announcement){.seconds = -1};
}

static even_status unexpected(const char *service, int status) {
  return even_fail(EVEN_ERR_INPUT, "%s answers with status %d", service, status);
}

/* ---- instants ---- */

/* Of the Gregorian calendar, from 1970-01-01 on (Howard Hinnant, "chrono-compatible low-level date algorithms"). */
static int64_t days_of(int year, int month, int day) {
  int64_t y = month <= 2 ? year - 1 : year;
  int64_t era = y / 400;
  int64_t of_era = y - era * 400;
  int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

static bool put_together(const int parts[6], int64_t *out) {
  int year = parts[0];
  bool fits = year >= 1970 && year <= 9999 && parts[1] >= 1 && parts[1] <= 12 && parts[2] >= 1 && parts[2] <= 31 &&
              parts[3] <= 23 && parts[4] <= 59 && parts[5] <= 60;
  if (fits) {
    *out = days_of(year, parts[1], parts[2]) * 86400 + parts[3] * 3600 + parts[4] * 60 + parts[5];
  }
  return fits;
}

/* Exactly so many digits; *at goes behind them. */
static bool digits(const char **at, int count, int *out) {
  *out = 0;
  for (int i = 0; i < count; i++, (*at)++) {
    if (**at < '0' || **at > '9') {
      return false;
    }
    *out = *out * 10 + (**at - '0');
  }
  return true;
}

static bool skip(const char **at, char c) {
  bool is = **at == c;
  *at += is ? 1 : 0;
  return is;
}

/* "2017-09-18T08:22:00Z", also with parts of a second. */
static bool read_iso(const char *text, int64_t *out) {
  int parts[6];
  bool fits = digits(&text, 4, &parts[0]) && skip(&text, '-') && digits(&text, 2, &parts[1]) && skip(&text, '-') &&
              digits(&text, 2, &parts[2]) && skip(&text, 'T') && digits(&text, 2, &parts[3]) && skip(&text, ':') &&
              digits(&text, 2, &parts[4]) && skip(&text, ':') && digits(&text, 2, &parts[5]);
  if (fits && skip(&text, '.')) {
    text += strspn(text, "0123456789");
  }
  return fits && strcmp(text, "Z") == 0 && put_together(parts, out);
}

/* "Mon, 19 Sep 2016 18:29:47 GMT" */
static bool read_http_date(const char *text, int64_t *out) {
  static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
  int parts[6];
  parts[1] = 0;
  if (strlen(text) != 29) {
    return false;
  }
  text += 5;
  bool fits = digits(&text, 2, &parts[2]) && skip(&text, ' ');
  for (int month = 0; fits && month < 12; month++) {
    parts[1] = strncmp(text, months + 3 * (size_t)month, 3) == 0 ? month + 1 : parts[1];
  }
  text += fits ? 3 : 0;
  fits = fits && skip(&text, ' ') && digits(&text, 4, &parts[0]) && skip(&text, ' ') && digits(&text, 2, &parts[3]) &&
         skip(&text, ':') && digits(&text, 2, &parts[4]) && skip(&text, ':') && digits(&text, 2, &parts[5]);
  return fits && strcmp(text, " GMT") == 0 && put_together(parts, out);
}

bool even_announcement_instant(const char *text, int64_t *out) {
  *out = 0;
  return read_iso(text, out) || read_http_date(text, out);
}

/* ---- Amazon ---- */

/* An object of JSON, of a service of that name. */
static even_status parse(const char *service, const char *body, size_t bytes, json_t **out) {
  if (even_json_parse("it", body, bytes, out) == EVEN_OK && json_is_object(*out)) {
    return EVEN_OK;
  }
  json_decref(*out);
  *out = NULL;
  return even_fail(EVEN_ERR_INPUT, "%s answers with no object of JSON", service);
}

even_status even_announcement_of_aws(int status, const char *body, size_t bytes, even_announcement *out) {
  json_t *object = NULL;
  nothing(out);
  if (status == 404) {
    return EVEN_OK;
  }
  if (status != 200) {
    return unexpected("spot/instance-action", status);
  }
  EVEN_TRY(parse("spot/instance-action", body, bytes, &object));
  const char *action = even_json_text(object, "action");
  if (action[0] != '\0') {
    say(out, action);
    (void)even_announcement_instant(even_json_text(object, "time"), &out->at);
  }
  json_decref(object);
  return out->due ? EVEN_OK : even_fail(EVEN_ERR_INPUT, "spot/instance-action answers without an action");
}

even_status even_announcement_of_aws_rebalance(int status, const char *body, size_t bytes, even_announcement *out) {
  json_t *object = NULL;
  nothing(out);
  if (status == 404) {
    return EVEN_OK;
  }
  if (status != 200) {
    return unexpected("recommendations/rebalance", status);
  }
  EVEN_TRY(parse("recommendations/rebalance", body, bytes, &object));
  json_decref(object);
  say(out, "rebalance recommendation");
  return EVEN_OK;
}

/* ---- words ---- */

/* The body without the white space around it; false: it is longer than a word, or has a NUL. */
static bool word_of(const char *body, size_t bytes, char out[MOST_WORD]) {
  while (bytes > 0 && strchr(" \t\r\n", body[0]) != NULL && body[0] != '\0') {
    body++;
    bytes--;
  }
  while (bytes > 0 && strchr(" \t\r\n", body[bytes - 1]) != NULL && body[bytes - 1] != '\0') {
    bytes--;
  }
  if (bytes >= MOST_WORD || memchr(body, '\0', bytes) != NULL) {
    return false;
  }
  memcpy(out, body, bytes);
  out[bytes] = '\0';
  return true;
}

static bool is_one_of(const char *word, const char *const *words) {
  while (*words != NULL && strcasecmp(word, *words) != 0) {
    words++;
  }
  return *words != NULL;
}

/* A number of seconds; < 0: it is none. */
static double seconds_of(const char *word) {
  char *end = NULL;
  double value = strtod(word, &end);
  bool fits = end != word && (*end == '\0' || strcmp(end, "s") == 0) && value >= 0 && value <= MOST_SECONDS;
  return fits ? value : -1;
}

even_status even_announcement_of_gcp(int status, const char *body, size_t bytes, even_announcement *out) {
  char word[MOST_WORD];
  nothing(out);
  if (status != 200) {
    return unexpected("instance/preempted", status);
  }
  if (!word_of(body, bytes, word) || (strcasecmp(word, "TRUE") != 0 && strcasecmp(word, "FALSE") != 0)) {
    return even_fail(EVEN_ERR_INPUT, "instance/preempted is neither TRUE nor FALSE");
  }
  if (strcasecmp(word, "TRUE") == 0) {
    say(out, "preempted");
    out->seconds = GCP_SECONDS;
  }
  return EVEN_OK;
}

static bool is_none(const char *word) {
  static const char *const none[] = {"0", "false", "no", "none", NULL};
  return is_one_of(word, none);
}

even_status even_announcement_of_text(int status, const char *body, size_t bytes, even_announcement *out) {
  char word[MOST_WORD];
  nothing(out);
  if (status == 204 || status == 404) {
    return EVEN_OK;
  }
  if (status != 200) {
    return unexpected("it", status);
  }
  bool short_enough = word_of(body, bytes, word);
  if (!short_enough || (word[0] != '\0' && !is_none(word))) {
    say(out, "notice");
    out->seconds = short_enough ? seconds_of(word) : -1;
  }
  return EVEN_OK;
}

void even_announcement_of_command(const char *output, size_t bytes, even_announcement *out) {
  char word[MOST_WORD];
  nothing(out);
  bool short_enough = word_of(output, bytes, word);
  if (!short_enough || !is_none(word)) {
    say(out, "exit code 0");
    out->seconds = short_enough ? seconds_of(word) : -1;
  }
}

/* ---- Azure ---- */

static bool concerns(const json_t *event, const char *name) {
  size_t at = 0;
  json_t *one = NULL;
  json_array_foreach(json_object_get(event, "Resources"), at, one) {
    const char *text = json_string_value(one);
    if (text != NULL && strcasecmp(text, name) == 0) {
      return true;
    }
  }
  return false;
}

static bool ends_it(const json_t *event) {
  static const char *const for_good[] = {"Preempt", "Terminate", NULL};
  static const char *const for_a_while[] = {"Reboot", "Redeploy", NULL};
  const char *type = even_json_text(event, "EventType");
  const char *status = even_json_text(event, "EventStatus");
  if (strcasecmp(status, "Scheduled") == 0) {
    return is_one_of(type, for_good) || is_one_of(type, for_a_while);
  }
  return strcasecmp(status, "Started") == 0 && is_one_of(type, for_good);
}

/* One without a time comes first: it has begun, or nobody knows better. */
static void take_event(const json_t *event, even_announcement *out) {
  char words[EVEN_ANNOUNCEMENT_WORDS];
  int64_t at = 0;
  (void)even_announcement_instant(even_json_text(event, "NotBefore"), &at);
  if (out->due && (out->at == 0 || (at != 0 && at >= out->at))) {
    return;
  }
  (void)snprintf(words, sizeof words, "%.40s", even_json_text(event, "EventType"));
  nothing(out);
  say(out, words);
  out->at = at;
}

even_status even_announcement_of_azure(int status, const char *body, size_t bytes, const char *name,
                                       even_announcement *out) {
  json_t *object = NULL;
  size_t at = 0;
  json_t *event = NULL;
  nothing(out);
  if (status != 200) {
    return unexpected("scheduledevents", status);
  }
  EVEN_TRY(parse("scheduledevents", body, bytes, &object));
  const json_t *events = json_object_get(object, "Events");
  bool whole = json_is_array(events);
  json_array_foreach(events, at, event) {
    if (concerns(event, name) && ends_it(event)) {
      take_event(event, out);
    }
  }
  json_decref(object);
  return whole ? EVEN_OK : even_fail(EVEN_ERR_INPUT, "scheduledevents answers without Events");
}
