/* Bytes on the ports at which a job listens: the agents' own of all its hosts, and where its ranks meet. */
#include "base/fail.h"
#include "cli/chaos.h"
#include "os/file.h"
#include "os/listening.h"
#include "os/net_namespace.h"
#include "os/port.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GARBAGE_BYTES = 4096, LARGEST_FACTS = 1 << 20, MOST_PORTS = 16, ADDRESS_BYTES = 64 };

/* What it begins as: nothing known, TLS (a handshake of 512 bytes), HTTP, a length of 2^63. */
static const struct {
  const char *words;
  const char *bytes;
  size_t length;
} beginnings[] = {{"random bytes", "", 0},
                  {"bytes like TLS", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 9},
                  {"bytes like HTTP", "POST /api HTTP/1.1\r\nContent-Length: 9223372036854775807\r\n\r\n", 59},
                  {"a huge length", "\x00\x00\x00\x00\x00\x00\x00\x80", 8}};

/* ---- what processes say of themselves ---- */

bool even_chaos_variable_of(pid_t pid, const char *name, char *out, size_t bytes) {
  char path[64];
  even_text all = EVEN_TEXT_EMPTY;
  bool found = false;
  (void)snprintf(path, sizeof path, "/proc/%ld/environ", (long)pid);
  if (even_file_read(path, LARGEST_FACTS, &all) != EVEN_OK) {
    even_error_clear();
  }
  size_t length = strlen(name);
  for (size_t at = 0; at < all.length; at += strlen(all.data + at) + 1) {
    if (strncmp(all.data + at, name, length) == 0 && all.data[at + length] == '=') {
      (void)snprintf(out, bytes, "%s", all.data + at + length + 1);
      found = true;
    }
  }
  even_text_free(&all);
  return found;
}

int even_chaos_port_of(pid_t pid, const char *name) {
  char value[16];
  return even_chaos_variable_of(pid, name, value, sizeof value) ? (int)strtol(value, NULL, 10) : 0;
}

pid_t even_chaos_parent_of(pid_t pid) {
  char path[64];
  even_text text = EVEN_TEXT_EMPTY;
  pid_t parent = 0;
  (void)snprintf(path, sizeof path, "/proc/%ld/status", (long)pid);
  if (even_file_read(path, LARGEST_FACTS, &text) == EVEN_OK) {
    const char *at = strstr(even_text_string(&text), "\nPPid:");
    parent = at == NULL ? 0 : (pid_t)strtol(at + 6, NULL, 10);
  } else {
    even_error_clear();
  }
  even_text_free(&text);
  return parent;
}

/* ---- networks ---- */

even_status even_chaos_enter(const even_chaos_job *job, pid_t pid, int *before) {
  *before = -1;
  return job->network == NULL ? EVEN_OK : even_net_namespace_enter(pid, before);
}

even_status even_chaos_leave(int before) {
  return before < 0 ? EVEN_OK : even_net_namespace_leave(before);
}

/* ---- garbage ---- */

static void say(char *words, size_t bytes, int port, const char *whose) {
  size_t length = strlen(words);
  (void)snprintf(words + length, bytes - length, "%s%d (%s)", length == 0 ? "ports " : ", ", port, whose);
}

static even_status send_to_agent(const even_chaos_job *job, pid_t agent, const char *whose, const void *garbage,
                                 char *words, size_t bytes) {
  even_listening ports[MOST_PORTS];
  size_t count = 0;
  int before = -1;
  EVEN_TRY(even_listening_of(agent, ports, MOST_PORTS, &count));
  if (count == 0 || even_chaos_enter(job, agent, &before) != EVEN_OK) {
    even_error_clear(); /* it ends just now */
    return EVEN_OK;
  }
  for (size_t i = 0; i < count; i++) {
    if (even_port_send(ports[i].address, ports[i].port, garbage, GARBAGE_BYTES) == EVEN_OK) {
      say(words, bytes, ports[i].port, whose);
    } else {
      even_error_clear();
    }
  }
  return even_chaos_leave(before);
}

/* To the store at which the ranks have met, from this rank's host. */
static even_status send_to_store(const even_chaos_job *job, pid_t rank, const void *garbage, char *words,
                                 size_t bytes) {
  char address[ADDRESS_BYTES];
  int port = even_chaos_port_of(rank, "MASTER_PORT");
  int before = -1;
  if (port <= 0 || port > UINT16_MAX || !even_chaos_variable_of(rank, "MASTER_ADDR", address, sizeof address) ||
      even_chaos_enter(job, rank, &before) != EVEN_OK) {
    even_error_clear();
    return EVEN_OK;
  }
  if (even_port_send(address, port, garbage, GARBAGE_BYTES) == EVEN_OK) {
    say(words, bytes, port, "MASTER_PORT");
  } else {
    even_error_clear();
  }
  return even_chaos_leave(before);
}

even_status even_chaos_send_garbage(even_chaos_job *job, const even_process_stat *rank) {
  unsigned char garbage[GARBAGE_BYTES];
  char ports[160] = "";
  char words[224];
  uint64_t mixed = job->plan[job->next].dice;
  size_t which = (size_t)(mixed >> 20) % (sizeof beginnings / sizeof beginnings[0]);
  pid_t agent = even_chaos_parent_of(rank->pid);
  if (job->cut_until_ns != 0) {
    return EVEN_OK; /* what is cut off cannot be reached */
  }
  for (size_t i = 0; i < sizeof garbage; i++) {
    mixed = mixed * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX */
    garbage[i] = (unsigned char)(mixed >> 56);
  }
  memcpy(garbage, beginnings[which].bytes, beginnings[which].length);
  EVEN_TRY(send_to_store(job, rank->pid, garbage, ports, sizeof ports));
  if (job->agent.process.pid > 0) {
    EVEN_TRY(send_to_agent(job, job->agent.process.pid, "the agent", garbage, ports, sizeof ports));
  }
  if (agent > 1 && agent != job->agent.process.pid) {
    EVEN_TRY(
        send_to_agent(job, agent, job->apart ? "the agent" : "another host's agent", garbage, ports, sizeof ports));
  }
  if (ports[0] != '\0') {
    (void)snprintf(words, sizeof words, "%s: %s", ports, beginnings[which].words);
    even_chaos_tell(job, words);
  }
  return EVEN_OK;
}
