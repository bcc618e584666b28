#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <set>

#include "common/error.h"
#include "common/files.h"
#include "worker/comm/gloo_mesh.h"

namespace muster {
namespace {

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  const int rc = getnameinfo(address, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return rc == 0 ? host : "";
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw IoError("cannot list this host's network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, freeifaddrs);
  std::set<std::string> usable;
  std::string v6;
  for (const ifaddrs* it = first; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr || (it->ifa_flags & IFF_UP) == 0) continue;
    const int family = it->ifa_addr->sa_family;
    if (family == AF_INET) {
      if (it->ifa_name == name) return numeric(it->ifa_addr, sizeof(sockaddr_in));
    } else if (family == AF_INET6) {
      const auto* in6 = reinterpret_cast<const sockaddr_in6*>(it->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr)) continue;
      if (it->ifa_name == name && v6.empty()) v6 = numeric(it->ifa_addr, sizeof(sockaddr_in6));
    } else {
      continue;
    }
    usable.insert(it->ifa_name);
  }
  if (!v6.empty()) return v6;
  std::string names;
  for (const std::string& one : usable) names += (names.empty() ? "" : ", ") + one;
  throw ConfigError("parallel.interface = \"" + name +
                    "\": no such interface with an address on this host; there are: " + names);
}

// Connecting a UDP socket sends nothing; it only makes the kernel choose the route.
std::string address_towards(std::string host) {
  if (host.starts_with("[") && host.ends_with("]")) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), "9", &hints, &found);
  if (rc != 0) {
    throw PeerError("cannot resolve the coordinator's host " + host + ": " + gai_strerror(rc));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, freeaddrinfo);
  for (const addrinfo* it = found; it != nullptr; it = it->ai_next) {
    const Fd fd(socket(it->ai_family, it->ai_socktype | SOCK_CLOEXEC, it->ai_protocol));
    if (!fd.valid() || connect(fd.get(), it->ai_addr, it->ai_addrlen) != 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0) continue;
    std::string address = numeric(reinterpret_cast<const sockaddr*>(&own), length);
    if (!address.empty()) return address;
  }
  throw PeerError("no route to the coordinator's host " + host +
                  "; name a network interface with parallel.interface");
}

}  // namespace

std::string local_address(const std::string& interface_name, const std::string& route_to) {
  if (!interface_name.empty()) return address_of_interface(interface_name);
  if (!route_to.empty()) return address_towards(route_to);
  return "127.0.0.1";
}

std::string interface_of(const std::string& address) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, freeifaddrs);
  for (const ifaddrs* it = first; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr) continue;
    const int family = it->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (numeric(it->ifa_addr, length) == address) return it->ifa_name;
  }
  return "";
}

}  // namespace muster
