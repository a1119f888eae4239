// Threads that take jobs from a store and read. They end when the store is closed.
#pragma once

#include <thread>
#include <vector>

namespace moeflux {

class Store;

class Readers {
public:
    Readers(Store& store, int n);
    ~Readers();  // joins; the store must be closed by then

private:
    std::vector<std::thread> threads_;
};

}  // namespace moeflux
