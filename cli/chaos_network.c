/* Hosts for a job that `evenstep chaos` disturbs, made of network namespaces, and the links between them, one of which
 * is cut. Each namespace lives as long as a process that holds it, which ends with this one: nothing can be left
 * behind.
 */
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "os/clock.h"
#include "os/net_namespace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUT_NS ((uint64_t)8 * 1000000000u)
/* Of the host that leads, where another one takes its place, which it does after 6 s at the earliest; its ranks are
 * ended after 20 s. */
#define LEADER_CUT_NS ((uint64_t)16 * 1000000000u)
enum { READY_MS = 60000 };
static const char holds[] = "ip link set lo up && echo ready && exec sleep infinity";

static const char *const hosts[EVEN_CHAOS_HOSTS] = {"here", "there", "yonder"};

/* As ssh: a host's name, a program and its words. What it starts outlives it, as it does on another machine. */
static const char shell[] =
    "#!/bin/sh\n"
    "name=$1\n"
    "shift\n"
    "exec 3<&0\n"
    "case $name in here) net=%s ;; there) net=%s ;; *) net=%s ;; esac\n"
    "EVENSTEP_HOST_ID=chaos-$name setsid nsenter --net=$net \"$@\" <&3 3<&- &\n"
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

/* Two hosts are on one wire. Three have a router between them, in the namespace after theirs. */
static even_status make_wire(const even_chaos_network *network) {
  char words[256];
  (void)snprintf(words, sizeof words,
                 "ip link add eth0 type veth peer name eth0 netns %ld && ip addr add 10.79.0.1/24 dev eth0 && "
                 "ip link set eth0 up",
                 (long)network->holders[1].process.pid);
  EVEN_TRY(run_there(network, 0, words));
  return run_there(network, 1, "ip addr add 10.79.0.2/24 dev eth0 && ip link set eth0 up");
}

static even_status link_up(const even_chaos_network *network, int host) {
  char words[192];
  if (network->hosts == 2) {
    return run_there(network, host, "ip link set eth0 up");
  }
  (void)snprintf(words, sizeof words, "ip link set eth0 up && ip route replace 10.79.0.0/16 via 10.79.%d.1",
                 host); /* a link that was down has none */
  return run_there(network, host, words);
}

static even_status make_routes(const even_chaos_network *network) {
  const int router = network->hosts;
  char words[256];
  EVEN_TRY(run_there(network, router, "echo 1 > /proc/sys/net/ipv4/ip_forward"));
  for (int host = 0; host < network->hosts; host++) {
    (void)snprintf(words, sizeof words,
                   "ip link add port%d type veth peer name eth0 netns %ld && ip addr add 10.79.%d.1/24 dev port%d && "
                   "ip link set port%d up",
                   host, (long)network->holders[host].process.pid, host, host, host);
    EVEN_TRY(run_there(network, router, words));
    (void)snprintf(words, sizeof words, "ip addr add 10.79.%d.2/24 dev eth0", host);
    EVEN_TRY(run_there(network, host, words));
    EVEN_TRY(link_up(network, host));
  }
  return EVEN_OK;
}

static even_status make_shell(even_chaos_network *network) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, shell, network->paths[0], network->paths[1], network->paths[network->hosts - 1]);
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
    (void)unsetenv("EVENSTEP_HOST_TIMEOUT"); /* the time of its cuts is reckoned with the usual one */
  }
  even_text_free(&text);
  return status;
}

even_status even_chaos_network_open(even_chaos_network *network, int count) {
  network->hosts = count < 2 ? 2 : count > EVEN_CHAOS_HOSTS ? EVEN_CHAOS_HOSTS : count;
  if (geteuid() != 0) {
    (void)even_fail(EVEN_ERR_PERMISSION, "chaos --namespaces: only root may make network namespaces");
    return even_error_fix("run it as root, or leave --namespaces and the kind partition out");
  }
  for (int i = 0; i < (network->hosts == 2 ? 2 : network->hosts + 1); i++) {
    if (hold(network, i) != EVEN_OK) {
      return lacks_tools();
    }
  }
  even_text_add(&network->names, network->hosts == 2 ? "here,there" : "here,there,yonder");
  EVEN_TRY(even_text_status(&network->names));
  even_status status = network->hosts == 2 ? make_wire(network) : make_routes(network);
  return status != EVEN_OK ? lacks_tools() : make_shell(network);
}

void even_chaos_network_close(even_chaos_network *network) {
  while (network->held > 0) {
    even_dialogue_end(&network->holders[--network->held]);
  }
  if (network->has_shell) {
    even_shared_memory_close(&network->shell);
    network->has_shell = false;
  }
  even_text_free(&network->names);
}

const char *even_chaos_host_name(int host) {
  return hosts[host];
}

bool even_chaos_is_on(const even_chaos_job *job, pid_t pid, int host) {
  return even_net_namespace_same(pid, job->network->holders[host].process.pid);
}

static void add_ranks(even_chaos_job *job, int host, bool there) {
  const even_state *state = even_history_state(job->history);
  for (int i = 0; i < state->ranks; i++) {
    pid_t pid = state->rank[i].pid;
    if (pid > 0 && even_chaos_rank_is_on(job, i, host) == there) {
      even_chaos_add_victim(job, pid);
    }
  }
}

void even_chaos_add_ranks_on(even_chaos_job *job, int host) {
  add_ranks(job, host, true);
}

static bool leads(const even_chaos_job *job, int host) {
  return even_chaos_is_on(job, job->agent.process.pid, host);
}

/* Ranks that may end by it: those of the host; where that one leads, and nobody takes its place, those of all others,
 * which wait until they are started again. */
static void add_ranks_of(even_chaos_job *job, int host) {
  add_ranks(job, host, !leads(job, host) || job->succeeds);
}

bool even_chaos_cuts_leader(const even_chaos_fault *fault) {
  return fault->kind == EVEN_CHAOS_CUT && fault->dice % EVEN_CHAOS_HOSTS == 0;
}

/* Any of them. Once another one leads there are two, and the link of the other one is cut: from the leader's side
 * neither would have a majority. */
static int choose_host(const even_chaos_job *job) {
  uint64_t dice = job->plan[job->next].dice;
  int host = (int)(dice % (uint64_t)job->network->hosts);
  if (!job->succeeded) {
    return host;
  }
  host = host == 0 ? 1 + (int)(dice / 3 % 2) : host;
  return even_chaos_is_on(job, job->leader.pid, host) ? 3 - host : host;
}

even_status even_chaos_cut(even_chaos_job *job) {
  if (job->cut_until_ns != 0) {
    return EVEN_OK; /* it is */
  }
  char words[96];
  const size_t fault = job->next;
  const int host = choose_host(job);
  const bool leader = leads(job, host);
  if (leader && job->succeeds && !even_chaos_is_voted_for(job)) {
    return EVEN_OK; /* the others may not know yet that they are to */
  }
  EVEN_TRY(run_there(job->network, host, "ip link set eth0 down"));
  job->cut_host = host;
  const uint64_t lasts_ns = leader && job->succeeds ? LEADER_CUT_NS : CUT_NS;
  job->cut_until_ns = even_clock_ns() + lasts_ns;
  (void)snprintf(words, sizeof words, "the link of host %s%s, for %.0f s", hosts[host], leader ? ", which leads" : "",
                 (double)lasts_ns * 1e-9);
  job->victim = -1;
  add_ranks_of(job, host);
  even_chaos_tell(job, words);
  if (leader && job->succeeds) {
    job->leader_cut = &job->done[fault];
    job->leader_linked_ns = 0;
    job->led_before = even_chaos_owner_of(even_text_string(&job->folder), 0).pid;
  }
  return EVEN_OK;
}

void even_chaos_network_relent(even_chaos_job *job, bool all) {
  if (job->cut_until_ns != 0 && (all || even_clock_ns() >= job->cut_until_ns)) {
    if (link_up(job->network, job->cut_host) != EVEN_OK) {
      even_error_clear(); /* the job cannot go on then, and says so */
    }
    job->cut_until_ns = 0;
  }
}
