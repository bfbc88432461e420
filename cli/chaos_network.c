/* Two hosts for a job that `evenstep chaos` disturbs, made of network namespaces, and the link between them, which is
 * cut. Each namespace lives as long as a process that holds it, which ends with this one: nothing can be left behind.
 */
#include "base/fail.h"
#include "cli/chaos.h"
#include "os/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUT_NS ((uint64_t)8 * 1000000000u)
enum { READY_MS = 60000 };
static const char holds[] = "ip link set lo up && echo ready && exec sleep infinity";

/* As ssh: a host's name, a program and its words. What it starts outlives it, as it does on another machine. */
static const char shell[] =
    "#!/bin/sh\n"
    "shift\n"
    "exec 3<&0\n"
    "EVENSTEP_HOST_ID=chaos-there nsenter --net=%s \"$@\" <&3 3<&- &\n"
    "wait $!\n";

static even_status lacks_tools(void) {
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "chaos --namespaces: unshare, nsenter or ip could not make a network: %.300s",
                  even_error_last()->what);
  return even_error_fix("apt-get install iproute2 util-linux; and let root make network namespaces");
}

static even_status hold(even_chaos_network *network, int host) {
  const char *words[] = {"unshare", "--net", "sh", "-c", holds, NULL};
  const char *line = NULL;
  char complaint[256];
  EVEN_TRY(even_dialogue_start((char *const *)(uintptr_t)words, &network->holders[host]));
  network->held = host + 1;
  EVEN_TRY(even_dialogue_hear(&network->holders[host], READY_MS, &line));
  if (line == NULL) {
    even_dialogue_complaint(&network->holders[host], complaint, sizeof complaint);
    return even_fail(EVEN_ERR_SYSTEM, "%s", complaint);
  }
  (void)snprintf(network->paths[host], sizeof network->paths[host], "/proc/%ld/ns/net",
                 (long)network->holders[host].process.pid);
  return EVEN_OK;
}

/* Runs the words in the namespace of a host; what they say of errors is the error. */
static even_status run_there(const even_chaos_network *network, int host, const char *script) {
  char enter[64];
  char complaint[256];
  const char *words[] = {"nsenter", enter, "sh", "-c", script, NULL};
  const char *line = "";
  even_dialogue dialogue;
  (void)snprintf(enter, sizeof enter, "--net=%s", network->paths[host]);
  EVEN_TRY(even_dialogue_start((char *const *)(uintptr_t)words, &dialogue));
  even_status status = EVEN_OK;
  while (status == EVEN_OK && line != NULL) {
    status = even_dialogue_hear(&dialogue, READY_MS, &line);
  }
  even_dialogue_complaint(&dialogue, complaint, sizeof complaint);
  even_dialogue_end(&dialogue);
  return status == EVEN_OK && complaint[0] != '\0' ? even_fail(EVEN_ERR_SYSTEM, "%s", complaint) : status;
}

static even_status make_link(const even_chaos_network *network) {
  char words[256];
  (void)snprintf(words, sizeof words,
                 "ip link add eth0 type veth peer name eth0 netns %ld && ip addr add 10.79.0.1/24 dev eth0 && "
                 "ip link set eth0 up",
                 (long)network->holders[1].process.pid);
  EVEN_TRY(run_there(network, 0, words));
  return run_there(network, 1, "ip addr add 10.79.0.2/24 dev eth0 && ip link set eth0 up");
}

static even_status make_shell(even_chaos_network *network) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, shell, network->paths[1]);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = even_shared_memory_begin("evenstep-chaos-shell", &network->shell);
  }
  if (status == EVEN_OK) {
    network->has_shell = true;
    status = even_shared_memory_grow(&network->shell, text.length);
  }
  if (status == EVEN_OK) {
    memcpy(network->shell.address, text.data, text.length);
    (void)snprintf(network->shell_path, sizeof network->shell_path, "/proc/%ld/fd/%d", (long)getpid(),
                   network->shell.fd);
    (void)snprintf(network->enter, sizeof network->enter, "--net=%s", network->paths[0]);
    (void)setenv("EVENSTEP_HOST_ID", "chaos-here", 1);
  }
  even_text_free(&text);
  return status;
}

even_status even_chaos_network_open(even_chaos_network *network) {
  if (geteuid() != 0) {
    (void)even_fail(EVEN_ERR_PERMISSION, "chaos --namespaces: only root may make network namespaces");
    return even_error_fix("run it as root, or leave --namespaces and the kind partition out");
  }
  for (int host = 0; host < 2; host++) {
    if (hold(network, host) != EVEN_OK) {
      return lacks_tools();
    }
  }
  return make_link(network) != EVEN_OK ? lacks_tools() : make_shell(network);
}

void even_chaos_network_close(even_chaos_network *network) {
  while (network->held > 0) {
    even_dialogue_end(&network->holders[--network->held]);
  }
  if (network->has_shell) {
    even_shared_memory_close(&network->shell);
    network->has_shell = false;
  }
}

even_status even_chaos_cut(even_chaos_job *job) {
  if (job->network == NULL) {
    even_chaos_tell_not(job, "one host has no link to cut: --namespaces makes two");
    return EVEN_OK;
  }
  if (job->cut_until_ns != 0) {
    return EVEN_OK; /* it is */
  }
  EVEN_TRY(run_there(job->network, 1, "ip link set eth0 down"));
  job->cut_until_ns = even_clock_ns() + CUT_NS;
  even_chaos_tell(job, "the link between the hosts, for 8 s");
  return EVEN_OK;
}

void even_chaos_network_relent(even_chaos_job *job, bool all) {
  if (job->cut_until_ns != 0 && (all || even_clock_ns() >= job->cut_until_ns)) {
    if (run_there(job->network, 1, "ip link set eth0 up") != EVEN_OK) {
      even_error_clear(); /* the job cannot go on then, and says so */
    }
    job->cut_until_ns = 0;
  }
}
