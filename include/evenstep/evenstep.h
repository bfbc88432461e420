/* Evenstep's C API: one include. Each header documents its part. */
#ifndef EVENSTEP_EVENSTEP_H
#define EVENSTEP_EVENSTEP_H

#include <evenstep/balancer.h>
#include <evenstep/checkpoint.h>
#include <evenstep/comm.h>
#include <evenstep/comm_costs.h>
#include <evenstep/device_comm.h>
#include <evenstep/exact.h>
#include <evenstep/flight.h>
#include <evenstep/norm.h>
#include <evenstep/optim.h>
#include <evenstep/status.h>
#include <evenstep/sync.h>
#include <evenstep/telemetry.h>
#include <evenstep/types.h>
#include <evenstep/version.h>

#endif
