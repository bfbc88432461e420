/* Where processes that another program has started on all hosts find their leader: a file that it writes, with its
 * addresses, its port and the job's key, in a folder that all see; or an address that all were told. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/launched.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/random.h"
#include "os/socket.h"

#include <evenstep/version.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 65536, MARK_DIGITS = 16 };

/* "10.0.0.1:7000", "trainer-0.jobs:7000"; what is no such thing, or is there, is a folder. */
static bool read_address(const char *where, even_rendezvous *out) {
  static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-";
  size_t length = strspn(where, allowed);
  const char *port = where + length + 1;
  if (length == 0 || length >= sizeof out->address || where[length] != ':' || port[0] == '\0' || strlen(port) > 5 ||
      port[strspn(port, "0123456789")] != '\0' || even_path_is_folder(where)) {
    return false;
  }
  memcpy(out->address, where, length);
  out->address[length] = '\0';
  out->port = (int)strtol(port, NULL, 10);
  return true;
}

static even_status check_address(const even_rendezvous *rendezvous, const char *where, bool has_key) {
  const char *address = rendezvous->address;
  if (address[strspn(address, "0123456789.")] == '\0' && !even_socket_is_address(address)) {
    (void)even_fail(EVEN_ERR_USAGE, "--rendezvous %s: no address", where);
    return even_error_fix("give the IPv4 address of process 0's host, as 10.0.0.1:7000, or its name");
  }
  if (rendezvous->port < 1 || rendezvous->port > 65535) {
    (void)even_fail(EVEN_ERR_USAGE, "--rendezvous %s: no port", where);
    return even_error_fix("give a port from 1 to 65535 that is free on the host of process 0");
  }
  if (!has_key) {
    (void)even_fail(EVEN_ERR_USAGE, "--rendezvous %s: the hosts have no key in common", where);
    return even_error_fix(
        "set EVENSTEP_JOB_KEY (openssl rand -hex %d) or EVENSTEP_JOB_KEY_FILE on all, or name a folder "
        "that all see",
        EVEN_TLS_KEY_BYTES);
  }
  return EVEN_OK;
}

even_status even_rendezvous_open(const char *where, const even_launched *launched, bool has_key, even_rendezvous *out) {
  *out = (even_rendezvous){.path = EVEN_TEXT_EMPTY};
  if (read_address(where, out)) {
    return check_address(out, where, has_key);
  }
  even_text folder = EVEN_TEXT_EMPTY;
  even_status status = even_path_absolute(where, &folder);
  if (status == EVEN_OK && !even_path_is_folder(folder.data)) {
    status = even_fail(EVEN_ERR_NOT_FOUND, "--rendezvous %s is no folder", where);
    (void)even_error_fix("name one that is there and that all hosts see, or ADDRESS:PORT or NAME:PORT of process 0");
  }
  if (status == EVEN_OK) {
    even_text_format(&out->path, "%s/.evenstep-%s%s", folder.data, launched->job[0] == '\0' ? "job" : "",
                     launched->job);
    status = even_text_status(&out->path);
  }
  even_text_free(&folder);
  return status;
}

void even_rendezvous_free(even_rendezvous *rendezvous) {
  even_text_free(&rendezvous->path);
}

static even_status tell_taken(const char *path) {
  (void)even_fail(EVEN_ERR_IN_USE, "%s is there: another job meets in it, or one that was killed has left it", path);
  return even_error_fix(
      "give each job a name of its own (EVENSTEP_HOST_JOB, the same on all its hosts) or folder (--rendezvous); "
      "where no job runs, remove it");
}

even_status even_rendezvous_check(const even_rendezvous *rendezvous, const even_launched *launched) {
  const char *path = even_text_string(&rendezvous->path);
  bool free = path[0] == '\0' || launched->job[0] != '\0' || !even_path_exists(path);
  return free ? EVEN_OK : tell_taken(path);
}

/* Whether these words stand there. */
static bool holds(const char *path, const even_text *words) {
  even_text found = EVEN_TEXT_EMPTY;
  bool same = even_file_read_private(path, MOST_BYTES, &found) == EVEN_OK && found.length == words->length &&
              memcmp(found.data, words->data, words->length) == 0;
  if (found.data != NULL) {
    explicit_bzero(found.data, found.length);
  }
  even_text_free(&found);
  return same;
}

/* A further name is given to nobody's file, not even where two try at once; some file systems say so of one that they
 * have given, and some have no further names. */
static even_status put_alone(const char *from, const char *path, const even_text *words) {
  even_status status = even_file_link(from, path);
  if (status != EVEN_OK && status != EVEN_ERR_IN_USE && !even_path_exists(path)) {
    return even_file_rename(from, path);
  }
  if (status != EVEN_OK && !holds(path, words)) {
    return tell_taken(path);
  }
  if (even_file_remove(from) != EVEN_OK) {
    even_error_clear(); /* the job's file is there, whole */
  }
  return EVEN_OK;
}

even_status even_rendezvous_write(const char *path, const even_text *words, bool unnamed) {
  char mark[MARK_DIGITS + 1];
  even_text own = EVEN_TEXT_EMPTY; /* a name that no other leader writes under */
  EVEN_TRY(even_random_hex(mark, MARK_DIGITS));
  even_text_format(&own, "%s.%s", path, mark);
  even_status status = even_text_status(&own);
  if (status == EVEN_OK) {
    status = even_file_replace_private(own.data, words->data, words->length);
    (void)(status == EVEN_OK ||
           even_error_fix("--rendezvous names a folder that you may write to and that all hosts see"));
  }
  if (status == EVEN_OK) {
    status = unnamed ? put_alone(own.data, path, words) : even_file_rename(own.data, path);
    if (status != EVEN_OK) {
      const even_error kept = *even_error_last();
      (void)!even_file_remove(own.data);
      (void)even_error_restore(&kept);
    }
  }
  even_text_free(&own);
  return status;
}

even_status even_rendezvous_remove(const char *path, const even_text *words) {
  if (!holds(path, words)) {
    even_error_clear();
    return EVEN_OK;
  }
  return even_file_remove(path);
}

static even_status write_own(const even_rendezvous *rendezvous, const even_launched *launched, const char *key,
                             even_text *out) {
  even_socket_addresses addresses;
  EVEN_TRY(even_socket_resolve(rendezvous->address, &addresses));
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "evenstep", even_version());
  even_json_string(&json, "key", key);
  even_json_integer(&json, "host", launched->place);
  even_json_integer(&json, "port", rendezvous->port);
  even_json_array(&json, "addresses");
  for (size_t i = 0; i < addresses.count; i++) {
    even_json_string(&json, NULL, addresses.items[i]);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  return even_text_status(out);
}

/* The leader's words, and who reads them. */
static even_status complete(const even_rendezvous *rendezvous, const even_launched *launched, const char *key,
                            const even_text *words, even_text *out) {
  json_t *invitation = NULL;
  EVEN_TRY(even_json_parse(rendezvous->path.data, even_text_string(words), words->length, &invitation));
  bool set = json_object_set_new(invitation, "host", json_integer(launched->place)) == 0 &&
             (key[0] == '\0' || json_object_set_new(invitation, "key", json_string(key)) == 0) &&
             json_object_set_new(invitation, "patience_seconds", json_integer(0)) == 0;
  char *line = set ? json_dumps(invitation, JSON_COMPACT) : NULL;
  char *shown = (char *)json_string_value(json_object_get(invitation, "key"));
  if (shown != NULL) {
    explicit_bzero(shown, strlen(shown));
  }
  json_decref(invitation);
  if (line == NULL) {
    return even_fail(EVEN_ERR_INPUT, "%s holds no invitation", rendezvous->path.data);
  }
  even_text_add(out, line);
  explicit_bzero(line, strlen(line));
  free(line);
  return even_text_status(out);
}

even_status even_rendezvous_read(const even_rendezvous *rendezvous, const even_launched *launched, const char *key,
                                 even_text *out) {
  even_text words = EVEN_TEXT_EMPTY;
  if (rendezvous->address[0] != '\0') {
    return write_own(rendezvous, launched, key, out);
  }
  even_status status = even_file_read_private(rendezvous->path.data, MOST_BYTES, &words);
  if (status == EVEN_OK) {
    status = complete(rendezvous, launched, key, &words, out);
  }
  if (words.data != NULL) {
    explicit_bzero(words.data, words.length);
  }
  even_text_free(&words);
  return status;
}
