/* The groups between the hosts that a group is made of: who carries which, and what they are called there. */
#include "comm/hosts/group.h"

#include "base/fail.h"

int even_comm_lane_rank(int lane, int lanes, int ranks) {
  return ranks < lanes ? (int)((int64_t)lane * ranks / lanes) : lane;
}

static even_status check_lane(const even_hosts_group *group, const even_comm_hosts *params, int lane) {
  const even_comm *given = lane == 0 ? params->between : params->lane == NULL ? NULL : params->lane[lane - 1];
  int local = even_comm_rank(params->inside);
  bool carries = local == even_hosts_carrier_of(group, lane);
  if (carries == (given != NULL) &&
      (!carries || (even_comm_ranks(given) == group->hosts && even_comm_rank(given) == group->own_host))) {
    if (given == NULL || even_comm_engine_of(given)->stir != NULL) {
      return EVEN_OK;
    }
    (void)even_fail(EVEN_ERR_UNSUPPORTED,
                    "a group between hosts is over a network, but lane %d is of the engine \"%s\"", lane,
                    even_comm_engine_name(given));
    return even_error_fix("open it with even_comm_open_ucx or even_comm_open_mpi");
  }
  return even_fail(EVEN_ERR_ARGUMENT,
                   "lane %d of %d between hosts is of one rank of each of %d hosts, in order; rank %d %s it", lane,
                   group->lanes, group->hosts, group->rank, carries ? "should have" : "should not have");
}

even_status even_hosts_take_lanes(even_hosts_group *group, const even_comm_hosts *params) {
  if (params->lanes < 0 || params->lanes > EVEN_COMM_LANES) {
    return even_fail(EVEN_ERR_ARGUMENT, "%d lanes between hosts; 1 to %d are possible", params->lanes, EVEN_COMM_LANES);
  }
  group->lanes = params->lanes == 0 ? 1 : params->lanes;
  for (int lane = 0; lane < group->lanes; lane++) {
    EVEN_TRY(check_lane(group, params, lane));
  }
  for (int lane = 0; lane < group->lanes; lane++) {
    group->lane[lane] = lane == 0 ? params->between : params->lane[lane - 1];
    for (int host = 0; host < group->hosts; host++) {
      int ranks = group->first[host + 1] - group->first[host];
      group->speakers[lane * group->hosts + host] =
          group->members[group->first[host] + even_comm_lane_rank(lane, group->lanes, ranks)];
    }
  }
  group->between = params->between;
  return EVEN_OK;
}

even_comm *even_hosts_part(const even_hosts_group *group, int *at) {
  even_comm *found = NULL;
  for (; *at < group->lanes + 2; ++*at) {
    found = *at == 0 ? group->inside : *at <= group->lanes ? group->lane[*at - 1] : group->everyone;
    if (found != NULL) {
      break;
    }
  }
  return found;
}
